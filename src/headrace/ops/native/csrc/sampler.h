// Choosing tokens and scoring them, one logits row at a time.
//
// Log probabilities are log-softmax of the raw logits: the sum of exponentials runs in double in index order; the rank
// of a token is the number of strictly greater logits; alternatives are ordered by (logit descending, id ascending).
//
// A choice, computed in double from the float logits l:
//   1. for ids of prompt or output: l > 0 ? l / repetition : l * repetition;
//      for ids of the output: - frequency * count - presence; then + logit_bias; banned ids = -inf
//   2. temperature 0: the greatest, lowest id on a tie. Else divide by temperature
//   3. order by (value descending, id ascending); keep top_k; weigh w = exp(value - greatest value), 0 below e^-700
//   4. min_p: drop w < min_p; mass = sum of the kept weights
//   5. top_p: keep the shortest beginning whose cumulative weight >= top_p * mass, at least one; mass = its weight
//   6. take the first whose cumulative weight > u * mass, with u = philox(seed, choice, position) / 2^53
// Cumulative weights add up in the order of step 3, and so does the mass of what top_k kept; the mass of a whole
// vocabulary adds up in index order, which spares a sort.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

namespace headrace {

// The upper 53 of the first 64 bits of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// 2011) with key (seed low, seed high) and counter (position, choice, 0, 0).
uint64_t philox(uint64_t seed, uint32_t choice, uint32_t position);

// All four words, for known-answer tests.
void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

struct Choice {
  double temperature, top_p, min_p;
  int top_k;
  uint64_t seed;
  uint32_t choice, position;
  double presence, frequency, repetition;
  std::vector<std::pair<int, double>> logit_bias;
  std::vector<int> banned, prompt, output;
};

struct RowRequest {
  std::optional<Choice> choice;
  int target = -1;   // the token to score where there is no choice
  int num_top = -1;  // -1: no log probabilities
};

struct RowResult {
  int token = -1;
  double logprob = 0.0;
  int rank = 0;
  std::vector<std::pair<int, double>> top;
  std::string fault;  // not empty: why there is no result
};

// A row of logits. Where whoever computed it has noted the greatest of each stretch (as `max_row` says it), nobody has to
// look at the whole row to find the greatest of all.
struct LogitsRow {
  const float* values;
  int size;
  const float* tops = nullptr;  // of stretches one after another; the last one may be shorter
  int stretch = 0;
};

RowResult finish_row(const Kernels& kernels, const LogitsRow& row, const RowRequest& request);

}  // namespace headrace
