#include "machine_limits.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "isa.h"
#include "memory.h"

namespace headrace {

#if !defined(HEADRACE_HAVE_AVX2)
const LimitLoops* avx2_limits() { return nullptr; }
#endif
#if !defined(HEADRACE_HAVE_AVX512)
const LimitLoops* avx512_limits() { return nullptr; }
#endif
#if !defined(HEADRACE_HAVE_AMX)
const LimitLoops* amx_limits() { return nullptr; }
#endif
#if !defined(HEADRACE_HAVE_NEON)
const LimitLoops* neon_limits() { return nullptr; }
#endif

namespace {

// Pieces of a job that each thread gets on average: one that loses its core for a while leaves the rest to others.
constexpr int kPiecesPerThread = 8;
constexpr int kMinRuns = 3;
constexpr double kPieceSeconds = 0.002;

const LimitLoops& loops_of(const std::string& isa) {
  const Kernels& kernels = find_kernels(isa);  // fails where it is not usable
  for (const LimitLoops* loops : {portable_limits(), avx2_limits(), avx512_limits(), amx_limits(), neon_limits()})
    if (loops && std::string(loops->isa) == kernels.name) return *loops;
  fail("no limits are known of instruction set ", kernels.name);
}

template <class Work>
double seconds_of(Work work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Others use the machine too, so the fastest run says most about the machine.
template <class Work>
double fastest_of(double seconds, Work work) {
  double best = seconds_of(work);
  double spent = best;
  for (int run = 1; run < kMinRuns || spent + best < seconds; ++run) {
    const double taken = seconds_of(work);
    best = std::min(best, taken);
    spent += taken;
  }
  return best;
}

ProductLoop loop_of(const LimitLoops& loops, const std::string& kind) {
  if (kind == "f32") return loops.f32;
  if (kind == "int4") return loops.int4;
  if (kind == "int8") return loops.int8;
  if (kind == "bf16") return loops.bf16;
  fail("products are f32, int4, int8 or bf16, got ", kind);
}

}  // namespace

double read_limit(ThreadPool& pool, const std::string& isa, size_t bytes, double seconds) {
  const LimitLoops& loops = loops_of(isa);
  const int pieces = kPiecesPerThread * pool.threads();
  const size_t piece = bytes / static_cast<size_t>(pieces) / kReadBytes * kReadBytes;
  if (piece == 0) fail("too little memory to measure reading it: ", bytes, " bytes");
  const Pages pages(piece * static_cast<size_t>(pieces));
  const auto at = [&](int i) { return pages.data() + piece * static_cast<size_t>(i); };
  // Pages that nobody has written to are all one page, which stays in the cache.
  pool.run(pieces, [&](int i) { std::memset(at(i), 0x3f, piece); });
  return static_cast<double>(pages.bytes()) /
         fastest_of(seconds, [&] { pool.run(pieces, [&](int i) { loops.read(at(i), piece); }); });
}

double product_limit(ThreadPool& pool, const std::string& isa, const std::string& kind, double seconds) {
  const ProductLoop loop = loop_of(loops_of(isa), kind);
  if (!loop.run) return 0.0;
  int64_t steps = 1000;  // of one piece
  while (seconds_of([&] { loop.run(steps); }) < kPieceSeconds) steps *= 2;
  const int pieces = kPiecesPerThread * pool.threads();
  return static_cast<double>(loop.operations * steps * pieces) /
         fastest_of(seconds, [&] { pool.run(pieces, [&](int) { loop.run(steps); }); });
}

}  // namespace headrace
