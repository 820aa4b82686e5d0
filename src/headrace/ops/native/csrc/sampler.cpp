#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <unordered_map>

namespace headrace {
namespace {

constexpr double kMinusInf = -std::numeric_limits<double>::infinity();

struct Place {
  double value;
  int id;
};

// Vectors as long as the vocabulary, kept by each thread: fresh ones would be fresh pages every time.
struct Scratch {
  std::vector<double> values, weights;
  std::vector<double> ranked, ranked_weights;  // in order, as far as anybody has looked
  std::vector<int> found;
  std::vector<Place> places;
};
thread_local Scratch scratch;

// Ids in order of (value descending, id ascending), found only as far as anybody looks: values are collected in bands
// below the greatest one, and a band is sorted a piece at a time.
class Ranking {
 public:
  Ranking(const Kernels& kernels, const std::vector<double>& values, double greatest)
      : kernels_(kernels), values_(values), greatest_(greatest) {
    found_.resize(values.size() + 1);  // finding writes one place ahead
    places_.clear();
  }

  const Place& operator[](size_t i) {
    while (i >= sorted_) {
      if (sorted_ == places_.size()) collect();
      sort_more();
    }
    return places_[i];
  }
  size_t sorted() const { return sorted_; }  // how many are in their places

 private:
  void collect() {
    const double ceiling = floor_;
    floor_ = width_ < 1000.0 ? greatest_ - width_ : kMinusInf;
    width_ *= 1.5;
    const int count = kernels_.find_row(values_.data(), floor_, ceiling, static_cast<int>(values_.size()), found_.data());
    for (int i = 0; i < count; ++i) {
      const int id = found_[static_cast<size_t>(i)];
      places_.push_back({values_[static_cast<size_t>(id)], id});
    }
  }

  void sort_more() {
    const auto better = [](const Place& a, const Place& b) {
      return a.value > b.value || (a.value == b.value && a.id < b.id);
    };
    const auto begin = places_.begin() + static_cast<std::ptrdiff_t>(sorted_);
    sorted_ = std::min(places_.size(), std::max<size_t>(64, 8 * sorted_));
    const auto end = places_.begin() + static_cast<std::ptrdiff_t>(sorted_);
    if (end != places_.end()) std::nth_element(begin, end, places_.end(), better);
    std::sort(begin, end, better);
  }

  const Kernels& kernels_;
  const std::vector<double>& values_;
  double greatest_;
  double floor_ = std::numeric_limits<double>::infinity();  // ids with values from here up are collected
  double width_ = 3.0;
  std::vector<int>& found_ = scratch.found;
  std::vector<Place>& places_ = scratch.places;  // what is collected
  size_t sorted_ = 0;                            // of it, in their places
};

// In the scratch.
std::vector<double>& divided(const Kernels& kernels, const float* logits, int n, double divisor) {
  scratch.values.resize(static_cast<size_t>(n));
  kernels.divide_row(logits, divisor, n, scratch.values.data());
  return scratch.values;
}

void score(const Kernels& kernels, const float* logits, int n, double greatest, int num_top, RowResult& result) {
  const std::vector<double>& values = divided(kernels, logits, n, 1.0);
  const double log_sum = greatest + std::log(kernels.sum_exp_row(values.data(), greatest, n));
  const float own = logits[result.token];
  result.logprob = static_cast<double>(own) - log_sum;
  for (int i = 0; i < n; ++i) result.rank += logits[i] > own;
  Ranking ranking(kernels, values, greatest);
  for (int i = 0; i < std::min(num_top, n); ++i) {
    const int id = ranking[static_cast<size_t>(i)].id;
    result.top.emplace_back(id, static_cast<double>(logits[id]) - log_sum);
  }
}

void adjust(const Choice& c, std::vector<double>& values) {
  std::unordered_map<int, int> counts;  // id -> occurrences in the output
  for (int id : c.prompt) counts.try_emplace(id, 0);
  for (int id : c.output) ++counts[id];
  for (const auto& [id, count] : counts) {
    double& value = values[static_cast<size_t>(id)];
    value = value > 0.0 ? value / c.repetition : value * c.repetition;
    if (count > 0) value = value - c.frequency * count - c.presence;
  }
  for (const auto& [id, bias] : c.logit_bias) values[static_cast<size_t>(id)] += bias;
  for (int id : c.banned) values[static_cast<size_t>(id)] = kMinusInf;
}

// Of values that the temperature has divided.
int draw(const Kernels& kernels, const std::vector<double>& values, double greatest, const Choice& c) {
  const size_t n = values.size();
  Ranking ranking(kernels, values, greatest);
  const auto weigh = [&](const std::vector<double>& from, size_t begin, std::vector<double>& weights) {
    weights.resize(from.size());
    kernels.exp_row(from.data() + begin, greatest, static_cast<int>(from.size() - begin), weights.data() + begin);
    for (size_t i = begin; c.min_p > 0.0 && i < from.size(); ++i) weights[i] = weights[i] < c.min_p ? 0.0 : weights[i];
  };
  std::vector<double>& ranked = scratch.ranked;
  std::vector<double>& ranked_weights = scratch.ranked_weights;
  ranked.clear();
  const auto weight_at = [&](size_t i) {
    if (i >= ranked.size()) {
      const size_t begin = ranked.size();
      ranked.push_back(ranking[i].value);
      while (ranked.size() < ranking.sorted()) ranked.push_back(ranking[ranked.size()].value);
      weigh(ranked, begin, ranked_weights);
    }
    return ranked_weights[i];
  };

  const bool some = c.top_k > 0 && static_cast<size_t>(c.top_k) < n;
  size_t kept = some ? static_cast<size_t>(c.top_k) : n;
  double mass = 0.0;
  if (some) {
    for (size_t i = 0; i < kept; ++i) mass += weight_at(i);
  } else if (c.min_p > 0.0) {
    weigh(values, 0, scratch.weights);
    mass = std::accumulate(scratch.weights.begin(), scratch.weights.end(), 0.0);
  } else {
    mass = kernels.sum_exp_row(values.data(), greatest, static_cast<int>(n));
  }
  if (c.top_p < 1.0) {
    const double wanted = c.top_p * mass;
    const size_t candidates = kept;
    mass = weight_at(0);
    for (kept = 1; kept < candidates && mass < wanted; ++kept) mass += weight_at(kept);
  }
  const double threshold = static_cast<double>(philox(c.seed, c.choice, c.position)) * 0x1p-53 * mass;
  double cumulative = 0.0;
  int chosen = ranking[0].id;
  for (size_t i = 0; i < kept && cumulative <= threshold; ++i) {
    const double weight = weight_at(i);
    if (weight == 0.0) break;  // nothing but zeros follows
    cumulative += weight;
    chosen = ranking[i].id;
  }
  return chosen;
}

// As `max_row` says it of the whole row.
float greatest_of(const Kernels& kernels, const LogitsRow& row) {
  if (!row.tops) return kernels.max_row(row.values, row.size);
  float greatest = -std::numeric_limits<float>::infinity();
  for (int i = 0; i * row.stretch < row.size; ++i) {
    if (!(row.tops[i] < std::numeric_limits<float>::infinity())) return row.tops[i];
    greatest = std::max(greatest, row.tops[i]);
  }
  return greatest;
}

int first_of(const LogitsRow& row, float greatest) {
  const float* begin = row.values;
  for (const float* top = row.tops; top && *top != greatest; ++top) begin += row.stretch;
  return static_cast<int>(std::find(begin, row.values + row.size, greatest) - row.values);
}

constexpr const char* kBanned = "every token is banned";
constexpr const char* kNoNumber = "not a number";

// A token, by temperature 0 the lowest id of the greatest value; or why there is none, null where there is.
const char* choose(const Kernels& kernels, const LogitsRow& row, float greatest, const Choice& c, int& token) {
  const bool plain = c.prompt.empty() && c.output.empty() && c.logit_bias.empty() && c.banned.empty();
  if (!(greatest > kMinusInf)) return kBanned;
  if (plain && c.temperature == 0.0) {
    token = first_of(row, greatest);
    return nullptr;
  }
  std::vector<double>& values = divided(kernels, row.values, row.size, plain ? c.temperature : 1.0);
  double top = greatest;
  if (!plain) {
    adjust(c, values);
    top = *std::max_element(values.begin(), values.end());
    if (top == kMinusInf) return kBanned;
    if (c.temperature == 0.0) {
      token = static_cast<int>(std::find(values.begin(), values.end(), top) - values.begin());
      return nullptr;
    }
    for (double& value : values) value /= c.temperature;
  }
  top /= c.temperature;
  // Penalties or a temperature next to zero: an infinity has no place in an order of bands.
  if (!(top < -kMinusInf)) return kNoNumber;
  token = draw(kernels, values, top, c);
  return nullptr;
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

RowResult finish_row(const Kernels& kernels, const LogitsRow& row, const RowRequest& request) {
  RowResult result;
  const float greatest = greatest_of(kernels, row);
  if (!(greatest < std::numeric_limits<float>::infinity())) {
    result.fault = kNoNumber;
    return result;
  }
  result.token = request.target;
  const char* fault = request.choice ? choose(kernels, row, greatest, *request.choice, result.token) : nullptr;
  if (fault)
    result.fault = fault;
  else if (request.num_top >= 0)
    score(kernels, row.values, row.size, greatest, request.num_top, result);
  return result;
}

}  // namespace headrace
