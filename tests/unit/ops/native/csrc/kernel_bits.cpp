// Prints, for each instruction set of this CPU, a hash of the logits of a small model over every weight type: the same
// number must come out everywhere. For machines on which no Python runs, such as an emulator.

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "isa.h"
#include "program.h"

using namespace headrace;

namespace {

uint32_t state = 1;
uint32_t draw() {  // xorshift32
  state ^= state << 13;
  state ^= state >> 17;
  state ^= state << 5;
  return state;
}

// Random bytes whose floats are finite and small: the two bytes of a half or bfloat16 get an exponent of about 1/8.
std::unique_ptr<Weight> make(ThreadPool& pool, const std::string& name, int rows, int cols) {
  const WeightType type = weight_type(name);
  const size_t values = name[0] == 'q' ? 32 : 1;
  const size_t size = name == "f32" ? 4 : name == "q4_0" ? 18 : name == "q4_1" ? 20 : name == "q8_0" ? 34 : 2;
  std::vector<std::byte> data(static_cast<size_t>(rows * cols) / values * size);
  for (std::byte& byte : data) byte = static_cast<std::byte>(draw());
  const uint16_t exponent = name == "f32" || name == "bf16" ? 0x3d00 : name[0] == 'q' ? 0x1800 : 0x2c00;
  const auto tame = [&](size_t i) {
    const uint16_t half = static_cast<uint16_t>((draw() & 0x80ff) | exponent);
    data[i] = static_cast<std::byte>(half & 0xff);
    data[i + 1] = static_cast<std::byte>(half >> 8);
  };
  for (size_t i = 0; i < data.size(); i += size) {
    tame(name == "f32" ? i + 2 : i);
    if (name == "q4_1") tame(i + 2);
  }
  return std::make_unique<Weight>(pool, type, rows, cols, data.data(), data.size());
}

uint64_t hash_of(const Kernels& kernels, Rounding rounding) {
  state = 1;
  ThreadPool pool(2);
  std::vector<std::unique_ptr<Weight>> kept;
  const auto weight = [&](const std::string& type, int rows, int cols) -> const Weight& {
    kept.push_back(make(pool, type, rows, cols));
    return *kept.back();
  };
  Program program(pool, kernels, rounding, {6, 2, 16, 64}, 512);
  const std::vector<double> frequencies{1.0, 0.5, 0.3, 0.1, 0.05, 0.02, 0.01, 0.001};
  int x = program.embed(weight("q8_0", 50, 64));
  int layer = 0;
  for (const std::string type : {"f32", "f16", "bf16", "q4_0", "q4_1", "q8_0"}) {
    const int normed = program.rms_norm(x, weight("f32", 1, 64), 1e-5f);
    const int qkv = program.linear(normed, {&weight(type, 128, 64)}, {});
    const int seen = program.attention(qkv, layer, {4, 2, 16, 0.25f}, frequencies, layer % 2 == 0);
    ++layer;
    x = program.add(x, program.linear(seen, {&weight(type, 64, 64)}, {}));
    const int hidden = program.silu_mul(program.linear(x, {&weight(type, 192, 64)}, {}));
    x = program.add(x, program.linear(hidden, {&weight(type, 64, 96)}, {}));
  }
  program.seal(program.linear(program.select_logit_rows(x), {&weight("q4_1", 50, 64)}, {}));

  uint64_t hash = 1469598103934665603u;  // FNV-1a
  int position = 0;
  for (const int count : {300, 1, 7, 1}) {
    Step step;
    for (int i = 0; i < count; ++i) step.tokens.push_back(static_cast<int>(draw() % 50));
    step.token_starts = {0, count};
    step.positions = {position};
    for (int i = 0; i < 20; ++i) step.blocks.push_back(i);
    step.block_starts = {0, 20};
    step.logit_rows = {count - 1};
    program.run(step);
    position += count;
    const auto* bytes = reinterpret_cast<const unsigned char*>(program.logits_row(0));
    for (int i = 0; i < 50 * 4; ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
    if (!(program.logits_row(0)[0] == program.logits_row(0)[0])) std::printf("not a number\n");
  }
  return hash;
}

}  // namespace

int main() {
  for (const Kernels* kernels : usable_kernels())
    for (const bool int8 : {false, true})
      std::printf("%s %s %016llx\n", kernels->name, int8 ? "int8" : "f32",
                  static_cast<unsigned long long>(hash_of(*kernels, {false, int8})));
}
