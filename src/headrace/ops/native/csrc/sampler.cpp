#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <unordered_map>

namespace headrace {
namespace {

constexpr double kMinusInf = -std::numeric_limits<double>::infinity();

// The order of candidates: greater values first, lower ids on a tie.
template <class Value>
auto better(const Value* values) {
  return [values](int a, int b) { return values[a] > values[b] || (values[a] == values[b] && a < b); };
}

// Candidates in order, sorted only as far as anybody has looked.
template <class Value>
class Ranking {
 public:
  Ranking(const Value* values, std::vector<int> ids) : better_(better(values)), ids_(std::move(ids)) {}

  size_t size() const { return ids_.size(); }

  int operator[](size_t i) {
    while (i >= sorted_) extend(std::max<size_t>(64, 8 * sorted_));
    return ids_[i];
  }

  void truncate(size_t size) {
    if (size >= ids_.size()) return;
    extend(size);
    ids_.resize(size);
    sorted_ = size;
  }

 private:
  void extend(size_t size) {
    if (size <= sorted_) return;
    const auto begin = ids_.begin() + static_cast<std::ptrdiff_t>(sorted_);
    const auto end = size < ids_.size() ? ids_.begin() + static_cast<std::ptrdiff_t>(size) : ids_.end();
    if (end != ids_.end()) std::nth_element(begin, end, ids_.end(), better_);
    std::sort(begin, end, better_);
    sorted_ = std::min(size, ids_.size());
  }

  decltype(better(static_cast<const Value*>(nullptr))) better_;
  std::vector<int> ids_;
  size_t sorted_ = 0;
};

std::vector<int> all_ids(int n) {
  std::vector<int> ids(static_cast<size_t>(n));
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

void score(const float* logits, int n, int num_top, RowResult& result) {
  const double greatest = *std::max_element(logits, logits + n);
  double sum = 0.0;
  for (int i = 0; i < n; ++i) sum += std::exp(static_cast<double>(logits[i]) - greatest);
  const double log_sum = greatest + std::log(sum);
  const float own = logits[result.token];
  result.logprob = static_cast<double>(own) - log_sum;
  result.rank = static_cast<int>(std::count_if(logits, logits + n, [own](float l) { return l > own; }));
  if (num_top <= 0) return;
  Ranking<float> ranking(logits, all_ids(n));
  for (int i = 0; i < std::min(num_top, n); ++i) {
    const int id = ranking[static_cast<size_t>(i)];
    result.top.emplace_back(id, static_cast<double>(logits[id]) - log_sum);
  }
}

std::vector<double> adjusted(const float* logits, int n, const Choice& c) {
  std::vector<double> values(logits, logits + n);
  if (!c.prompt.empty() || !c.output.empty()) {
    std::unordered_map<int, int> counts;  // id -> occurrences in the output
    for (int id : c.prompt) counts.try_emplace(id, 0);
    for (int id : c.output) ++counts[id];
    for (const auto& [id, count] : counts) {
      double& value = values[static_cast<size_t>(id)];
      value = value > 0.0 ? value / c.repetition : value * c.repetition;
      if (count > 0) value = value - c.frequency * count - c.presence;
    }
  }
  for (const auto& [id, bias] : c.logit_bias) values[static_cast<size_t>(id)] += bias;
  for (int id : c.banned) values[static_cast<size_t>(id)] = kMinusInf;
  return values;
}

int draw(std::vector<double>& values, const Choice& c, double greatest) {
  const int n = static_cast<int>(values.size());
  std::vector<double> weights(values.size());
  for (size_t i = 0; i < values.size(); ++i) values[i] /= c.temperature;
  greatest /= c.temperature;
  Ranking<double> ranking(values.data(), all_ids(n));
  double mass = 0.0;
  const auto weigh = [&](int id) {
    const double weight = std::exp(values[static_cast<size_t>(id)] - greatest);
    return weight < c.min_p ? 0.0 : weight;
  };
  if (c.top_k > 0 && c.top_k < n) {
    ranking.truncate(static_cast<size_t>(c.top_k));
    for (size_t i = 0; i < ranking.size(); ++i) {
      const auto id = static_cast<size_t>(ranking[i]);
      mass += weights[id] = weigh(ranking[i]);
    }
  } else {
    for (int id = 0; id < n; ++id) mass += weights[static_cast<size_t>(id)] = weigh(id);
  }
  const auto weight_at = [&](size_t i) { return weights[static_cast<size_t>(ranking[i])]; };

  size_t kept = ranking.size();
  if (c.top_p < 1.0) {
    const double wanted = c.top_p * mass;
    mass = weight_at(0);
    for (kept = 1; kept < ranking.size() && mass < wanted; ++kept) mass += weight_at(kept);
  }
  const double u = static_cast<double>(philox(c.seed, c.choice, c.position)) * 0x1p-53;
  const double threshold = u * mass;
  double cumulative = 0.0;
  int last = ranking[0];
  for (size_t i = 0; i < kept; ++i) {
    const double weight = weight_at(i);
    if (weight == 0.0) break;  // nothing but zeros follows
    cumulative += weight;
    last = ranking[i];
    if (cumulative > threshold) break;
  }
  return last;
}

}  // namespace

void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
  uint32_t k0 = key[0], k1 = key[1];
  std::copy(counter, counter + 4, out);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * out[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * out[2];
    const uint32_t next[4] = {static_cast<uint32_t>(p1 >> 32) ^ out[1] ^ k0, static_cast<uint32_t>(p1),
                              static_cast<uint32_t>(p0 >> 32) ^ out[3] ^ k1, static_cast<uint32_t>(p0)};
    std::copy(next, next + 4, out);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

uint64_t philox(uint64_t seed, uint32_t choice, uint32_t position) {
  const uint32_t counter[4] = {position, choice, 0, 0};
  const uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  uint32_t words[4];
  philox4x32(counter, key, words);
  return (uint64_t{words[0]} << 32 | words[1]) >> 11;
}

RowResult finish_row(const float* logits, int vocab_size, const RowRequest& request) {
  RowResult result;
  bool finite = true;
  for (int i = 0; i < vocab_size; ++i) finite &= logits[i] < std::numeric_limits<float>::infinity();  // not of a NaN
  if (!finite) {
    result.fault = "not a number";
    return result;
  }
  result.token = request.target;
  if (request.choice) {
    std::vector<double> values = adjusted(logits, vocab_size, *request.choice);
    const auto greatest = std::max_element(values.begin(), values.end());  // the first on a tie
    if (*greatest == kMinusInf) {
      result.fault = "every token is banned";
      return result;
    }
    result.token = request.choice->temperature == 0.0 ? static_cast<int>(greatest - values.begin())
                                                      : draw(values, *request.choice, *greatest);
  }
  if (request.num_top >= 0) score(logits, vocab_size, request.num_top, result);
  return result;
}

}  // namespace headrace
