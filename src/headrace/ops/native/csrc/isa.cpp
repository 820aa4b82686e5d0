#include "isa.h"

#include "memory.h"

#if defined(HEADRACE_HAVE_AMX) && !defined(HEADRACE_EMULATE_AVX512)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#endif

#if defined(HEADRACE_HAVE_NEON) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace headrace {

#if !defined(HEADRACE_HAVE_AVX2)
const Kernels* avx2_kernels() { return nullptr; }
#endif
#if !defined(HEADRACE_HAVE_AVX512)
const Kernels* avx512_kernels() { return nullptr; }
#endif
#if !defined(HEADRACE_HAVE_AMX)
const Kernels* amx_kernels() { return nullptr; }
#endif
#if !defined(HEADRACE_HAVE_NEON)
const Kernels* neon_kernels() { return nullptr; }
#endif

namespace {

bool cpu_has_neon() {
#if !defined(HEADRACE_HAVE_NEON)
  return false;
#elif defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return true;  // Apple's cores all have the dot product
#endif
}

bool cpu_has_avx2() {
#if defined(HEADRACE_HAVE_AVX2)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

bool cpu_has_avx512() {
#if defined(HEADRACE_EMULATE_AVX512)
  return true;
#elif defined(HEADRACE_HAVE_AVX512)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

#if defined(HEADRACE_HAVE_AMX) && !defined(HEADRACE_EMULATE_AVX512)
bool cpu_has_tiles() {
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25, kBf16 = 1u << 22, kAll = kTile | kInt8 | kBf16;
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kAll) == kAll && cpu_has_avx512();
}

// Linux keeps the registers' state only for processes that have asked for it; it says no where it does not know them, or where
// the signal stack of a thread has no room for them. 0, or the error.
int tiles_error() {
  constexpr long kRequest = 0x1023, kTileData = 18;
  static const int error = syscall(SYS_arch_prctl, kRequest, kTileData) == 0 ? 0 : errno;
  return error;
}
#endif

bool cpu_has_amx() {
#if !defined(HEADRACE_HAVE_AMX)
  return false;
#elif defined(HEADRACE_EMULATE_AVX512)
  return true;
#else
  return cpu_has_tiles() && tiles_error() == 0;
#endif
}

}  // namespace

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> usable{portable_kernels()};
  if (cpu_has_neon()) usable.push_back(neon_kernels());
  if (cpu_has_avx2()) usable.push_back(avx2_kernels());
  if (cpu_has_avx512()) usable.push_back(avx512_kernels());
  if (cpu_has_amx()) usable.push_back(amx_kernels());
  return usable;
}

std::vector<std::string> usable_names() {
  std::vector<std::string> names;
  for (const Kernels* kernels : usable_kernels()) names.emplace_back(kernels->name);
  return names;
}

std::string amx_refusal() {
#if defined(HEADRACE_HAVE_AMX) && !defined(HEADRACE_EMULATE_AVX512)
  if (!cpu_has_tiles() || tiles_error() == 0) return {};
  if (tiles_error() == ENOSPC) return "a thread's signal stack has no room for the registers of AMX";
  return "the system does not keep the registers of AMX (error " + std::to_string(tiles_error()) + ")";
#else
  return {};
#endif
}

const Kernels& find_kernels(const std::string& name) {
  const auto usable = usable_kernels();
#if defined(HEADRACE_EMULATE_AVX512)
  if (name == "auto") return *usable[1];
#endif
  if (name == "auto") return *usable.back();
  std::string names;
  for (const Kernels* kernels : usable) {
    if (name == kernels->name) return *kernels;
    names += names.empty() ? kernels->name : std::string(", ") + kernels->name;
  }
  fail("instruction set ", name, " is not usable here, only ", names);
}

}  // namespace headrace
