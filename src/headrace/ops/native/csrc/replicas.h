// Which workers have which block (core/router/replicas.py): tables of names, and of the sets of workers that occur.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace headrace {

// Blocks of a prompt, and prompts with a common beginning, are with the same workers, so a block has the number of a set, and
// each set that occurs is kept once, as Python's integer of its bits. A name is 16 bytes; what is shorter counts as filled
// with zeros, what is longer as cut.
class Replicas {
 public:
  static constexpr uint32_t kParts = 4096;  // as in core/router/replicas.py

  size_t add(const nanobind::int_& bit, nanobind::handle names);
  size_t remove(const nanobind::int_& bit, nanobind::handle names);
  nanobind::int_ get(const nanobind::bytes& name) const;
  size_t discard(uint32_t part, const nanobind::int_& bits);
  nanobind::list items() const;

 private:
  using SetId = uint32_t;  // 0 = nobody
  using Name = std::array<uint32_t, 4>;
  struct Entry {
    Name name;
    SetId owners;
  };
  // Open addressing with linear probing: as names are hashes, they need no other.
  struct Part {
    std::unique_ptr<Entry[]> entries;
    uint32_t capacity = 0, size = 0;

    uint32_t home(const Name& name) const { return static_cast<uint32_t>((uint64_t{name[1]} * capacity) >> 32); }
    uint32_t next(uint32_t at) const { return at + 1 == capacity ? 0 : at + 1; }
    uint32_t find(const Name& name) const;  // where it is, or would be
    Entry& make_room(const Name& name);     // for one that is not there
    void erase(uint32_t at);
    void grow();
  };
  struct Set {
    nanobind::int_ mask;
    size_t num_blocks = 0;
  };
  // What becomes of sets by a change: the same for all blocks that have the same one.
  struct Change;

  static Name name_of(nanobind::handle name);
  static uint32_t part_of(const Name& name);
  std::vector<Name> read(nanobind::handle names) const;
  SetId id_of(const nanobind::int_& mask);
  void move(Entry& entry, SetId to);
  void forget_unused();

  std::array<Part, kParts> parts_;
  std::vector<Set> sets_ = std::vector<Set>(1);
  std::vector<SetId> free_, unused_;  // the latter since the change began
  nanobind::dict id_of_mask_;
};

void add_replicas(nanobind::module_& m);

}  // namespace headrace
