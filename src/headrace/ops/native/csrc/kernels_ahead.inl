// Fetching weights ahead. Included once for each instruction set, after its simd header.

namespace headrace::HEADRACE_ISA {
namespace {

// The panels that are read after `count` ones from `panel` on. As a walk over these goes along, it fetches the same places
// of those: the hardware sees each panel's end as the end of a stream.
struct Ahead {
  const std::byte* first;
  size_t stride;
  __attribute__((always_inline)) static Ahead of(const LinearSpan& s, int panel, int count) {
    if (panel + count < s.num_panels) return {s.panels + (panel + count) * s.panel_bytes, s.panel_bytes};
    return {s.next, s.next_bytes > s.panel_bytes ? s.next_bytes : s.panel_bytes};
  }
  __attribute__((always_inline)) void fetch(int nth, size_t offset, size_t bytes) const {
    if (!first) return;
    for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(first + nth * stride + offset + line);
  }
};

}  // namespace
}  // namespace headrace::HEADRACE_ISA
