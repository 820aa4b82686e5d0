// Prints, for each instruction set of this CPU, type of activations and type of KV, a hash of the logits of a small model
// over every weight type: the same number must come out everywhere. For machines on which no Python runs, such as an
// emulator.

#include <cstdio>
#include <map>
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

struct Layout {  // of a block: values, bytes, the exponent that its halves get, and where they are
  size_t values, size;
  uint16_t exponent;
  std::vector<size_t> halves;
  bool has_offset = false;  // a whole number, as the second half
};
const std::map<std::string, Layout> kLayouts{
    {"f32", {1, 4, 0x3d00, {2}}},         {"f16", {1, 2, 0x2c00, {0}}},         {"bf16", {1, 2, 0x3d00, {0}}},
    {"q4_0", {32, 18, 0x1800, {0}}},      {"q4_1", {32, 20, 0x1800, {0, 2}}},   {"q5_0", {32, 22, 0x1400, {0}}},
    {"q5_1", {32, 24, 0x1400, {0, 2}}},   {"q8_0", {32, 34, 0x1800, {0}}},      {"q4_k", {256, 144, 0x0400, {0, 2}}},
    {"q4_g32", {32, 20, 0x1800, {0}, true}},      {"q4_g128", {128, 68, 0x1800, {0}, true}},
    {"q5_k", {256, 176, 0x0400, {0, 2}}}, {"q6_k", {256, 210, 0x0000, {208}}},
};

// Random bytes whose floats are finite and small: the two bytes of a half or bfloat16 get an exponent with which values
// come to about 1/8.
std::unique_ptr<Weight> make(ThreadPool& pool, const std::string& name, int rows, int cols) {
  const WeightType type = weight_type(name);
  const Layout& layout = kLayouts.at(name);
  std::vector<std::byte> data(static_cast<size_t>(rows * cols) / layout.values * layout.size);
  for (std::byte& byte : data) byte = static_cast<std::byte>(draw());
  const auto tame = [&](size_t i) {
    const uint16_t half = static_cast<uint16_t>((draw() & 0x80ff) | layout.exponent);
    data[i] = static_cast<std::byte>(half & 0xff);
    data[i + 1] = static_cast<std::byte>(half >> 8);
  };
  for (size_t i = 0; i < data.size(); i += layout.size) {
    for (const size_t half : layout.halves) tame(i + half);
    if (layout.has_offset) {  // from -15 to -8
      data[i + 2] = static_cast<std::byte>((draw() & 1) << 7);
      data[i + 3] = static_cast<std::byte>(0xc8 | (draw() & 3));
    }
  }
  return std::make_unique<Weight>(pool, type, rows, cols, data.data(), data.size());
}

uint64_t hash_of(const Kernels& kernels, Rounding rounding, KvType kv) {
  state = 1;
  ThreadPool pool(2);
  std::vector<std::unique_ptr<Weight>> kept;
  // At most one in an expression: compilers choose the order in which arguments are made, and so would what is drawn.
  const auto weight = [&](const std::string& type, int rows, int cols) -> const Weight& {
    kept.push_back(make(pool, type, rows, cols));
    return *kept.back();
  };
  Program program(pool, kernels, rounding, {9, 2, 16, 64, kv}, 512);
  const std::vector<double> frequencies{1.0, 0.5, 0.3, 0.1, 0.05, 0.02, 0.01, 0.001};
  int x = program.embed(weight("q8_0", 50, 64));
  int layer = 0;
  for (const std::string type : {"f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_g32"}) {
    const int normed = program.rms_norm(x, weight("f32", 1, 64), 1e-5f);
    const int qkv = program.linear(normed, {&weight(type, 128, 64)}, {});
    const int seen = program.attention(qkv, layer, {4, 2, 16, 0.25f}, frequencies, layer % 2 == 0);
    ++layer;
    x = program.add(x, program.linear(seen, {&weight(type, 64, 64)}, {}));
    const int hidden = program.silu_mul(program.linear(x, {&weight(type, 192, 64)}, {}));
    x = program.add(x, program.linear(hidden, {&weight(type, 64, 96)}, {}));
  }
  for (const std::string type : {"q4_g128", "q4_k", "q5_k", "q6_k"}) {  // of rows four times as wide
    const int normed = program.rms_norm(x, weight("f32", 1, 64), 1e-5f);
    const int wide = program.linear(normed, {&weight("f16", 256, 64)}, {});
    x = program.add(x, program.linear(wide, {&weight(type, 64, 256)}, {}));
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
    const auto* bytes = reinterpret_cast<const unsigned char*>(program.logits_row(0).values);
    for (int i = 0; i < 50 * 4; ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
    if (!(program.logits_row(0).values[0] == program.logits_row(0).values[0])) std::printf("not a number\n");
  }
  return hash;
}

}  // namespace

int main() {
  for (const Kernels* kernels : usable_kernels())
    for (const std::string kv : {"bf16", "int8", "fp8"})
      for (const std::string activations : {"f32", "bf16", "int12", "int8"}) {
        const bool int12 = activations == "int12", exact = activations == "f32";
        const Rounding rounding{.bf16 = !exact, .int8 = int12 || activations == "int8", .int12 = int12, .attention = !exact};
        std::printf("%s %s+%s %016llx\n", kernels->name, activations.c_str(), kv.c_str(),
                    static_cast<unsigned long long>(hash_of(*kernels, rounding, kv_type(kv))));
      }
}
