#include "replicas.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

constexpr uint32_t kLeastCapacity = 8;

size_t num_bits(const nb::int_& mask) { return nb::cast<size_t>(mask.attr("bit_count")()); }

nb::int_ bits_without(const nb::int_& mask, const nb::int_& bits) { return nb::int_(mask & ~bits); }

bool has_any(const nb::int_& mask) { return PyObject_IsTrue(mask.ptr()) == 1; }

}  // namespace

// ---- a part

uint32_t Replicas::Part::find(const Name& name) const {
  uint32_t at = home(name);
  while (entries[at].owners != 0 && entries[at].name != name) at = next(at);
  return at;
}

void Replicas::Part::grow() {
  Part larger;
  larger.capacity = std::max(kLeastCapacity, capacity + capacity / 2);
  larger.entries = std::make_unique<Entry[]>(larger.capacity);
  for (uint32_t at = 0; at < capacity; ++at)
    if (entries[at].owners != 0) larger.entries[larger.find(entries[at].name)] = entries[at];
  larger.size = size;
  *this = std::move(larger);
}

Replicas::Entry& Replicas::Part::make_room(const Name& name) {
  if ((size + 1) * 5 > capacity * 4) grow();
  Entry& entry = entries[find(name)];
  entry.name = name;
  ++size;
  return entry;
}

// Those behind it move up, unless they would come before their home.
void Replicas::Part::erase(uint32_t at) {
  for (uint32_t behind = next(at); entries[behind].owners != 0; behind = next(behind)) {
    const uint32_t from = home(entries[behind].name);
    const bool is_between = at <= behind ? at < from && from <= behind : at < from || from <= behind;
    if (is_between) continue;
    entries[at] = entries[behind];
    at = behind;
  }
  entries[at].owners = 0;
  --size;
}

// ---- sets of workers

Replicas::Name Replicas::name_of(nb::handle name) {
  char* data;
  Py_ssize_t length;
  if (PyBytes_AsStringAndSize(name.ptr(), &data, &length) != 0) nb::raise_python_error();
  Name words{};
  std::memcpy(words.data(), data, std::min(sizeof(words), static_cast<size_t>(length)));
  return words;
}

uint32_t Replicas::part_of(const Name& name) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(name.data());
  return uint32_t{bytes[0]} << 4 | bytes[1] >> 4;
}

Replicas::SetId Replicas::id_of(const nb::int_& mask) {
  if (!has_any(mask)) return 0;
  if (PyObject* known = PyDict_GetItemWithError(id_of_mask_.ptr(), mask.ptr())) return nb::cast<SetId>(nb::handle(known));
  SetId id = static_cast<SetId>(sets_.size());
  if (free_.empty()) {
    sets_.push_back({mask});
  } else {
    id = free_.back();
    free_.pop_back();
    sets_[id] = {mask};
  }
  id_of_mask_[mask] = id;
  unused_.push_back(id);
  return id;
}

void Replicas::move(Entry& entry, SetId to) {
  if (entry.owners != 0 && --sets_[entry.owners].num_blocks == 0) unused_.push_back(entry.owners);
  if (to != 0) {
    ++sets_[to].num_blocks;
    entry.owners = to;
  }
}

void Replicas::forget_unused() {
  for (const SetId id : unused_) {
    Set& set = sets_[id];
    if (set.num_blocks != 0 || !has_any(set.mask)) continue;  // used again, or forgotten already
    nb::del(id_of_mask_[set.mask]);
    set.mask = nb::int_(0);
    free_.push_back(id);
  }
  unused_.clear();
}

struct Replicas::Change {
  struct Step {
    SetId to;
    size_t num_replicas;  // that it adds or takes
  };
  std::unordered_map<SetId, Step> steps;

  template <typename MakeMask>
  const Step& of(Replicas& replicas, SetId from, const MakeMask& make_mask) {
    const auto [place, is_new] = steps.try_emplace(from);
    if (is_new) {
      const nb::int_ before = from == 0 ? nb::int_(0) : replicas.sets_[from].mask;
      const nb::int_ after = make_mask(before);
      const size_t had = num_bits(before), has = num_bits(after);
      place->second = {replicas.id_of(after), had < has ? has - had : had - has};
    }
    return place->second;
  }
};

// ---- what Python sees

// Those of one call, and where they would be is on its way from memory.
std::vector<Replicas::Name> Replicas::read(nb::handle names) const {
  std::vector<Name> found;
  for (const nb::handle each : names) {
    const Name& name = found.emplace_back(name_of(each));
    const Part& part = parts_[part_of(name)];
    if (part.capacity != 0) __builtin_prefetch(&part.entries[part.home(name)]);
  }
  return found;
}

size_t Replicas::add(const nb::int_& bit, nb::handle names) {
  Change change;
  const auto with_bit = [&bit](const nb::int_& mask) { return nb::int_(mask | bit); };
  size_t count = 0;
  for (const Name& name : read(names)) {
    Part& part = parts_[part_of(name)];
    const uint32_t at = part.capacity == 0 ? 0 : part.find(name);
    const SetId from = part.capacity == 0 ? 0 : part.entries[at].owners;
    const Change::Step& step = change.of(*this, from, with_bit);
    if (step.num_replicas == 0) continue;
    move(from == 0 ? part.make_room(name) : part.entries[at], step.to);
    ++count;
  }
  forget_unused();
  return count;
}

size_t Replicas::remove(const nb::int_& bit, nb::handle names) {
  Change change;
  const auto without_bit = [&bit](const nb::int_& mask) { return bits_without(mask, bit); };
  size_t count = 0;
  for (const Name& name : read(names)) {
    Part& part = parts_[part_of(name)];
    if (part.capacity == 0) continue;
    const uint32_t at = part.find(name);
    if (part.entries[at].owners == 0) continue;
    const Change::Step& step = change.of(*this, part.entries[at].owners, without_bit);
    if (step.num_replicas == 0) continue;
    move(part.entries[at], step.to);
    if (step.to == 0) part.erase(at);
    ++count;
  }
  forget_unused();
  return count;
}

nb::int_ Replicas::get(const nb::bytes& name) const {
  const Name words = name_of(name);
  const Part& part = parts_[part_of(words)];
  const SetId owners = part.capacity == 0 ? 0 : part.entries[part.find(words)].owners;
  return owners == 0 ? nb::int_(0) : sets_[owners].mask;
}

size_t Replicas::discard(uint32_t index, const nb::int_& bits) {
  if (index >= kParts) throw nb::index_error("no such part");
  Change change;
  const auto without = [&bits](const nb::int_& mask) { return bits_without(mask, bits); };
  Part& part = parts_[index];
  size_t count = 0;
  std::vector<Name> gone;
  for (uint32_t at = 0; at < part.capacity; ++at) {
    Entry& entry = part.entries[at];
    if (entry.owners == 0) continue;
    const Change::Step& step = change.of(*this, entry.owners, without);
    if (step.num_replicas == 0) continue;
    count += step.num_replicas;
    move(entry, step.to);
    if (step.to == 0) gone.push_back(entry.name);
  }
  for (const Name& name : gone) part.erase(part.find(name));
  forget_unused();
  return count;
}

nb::list Replicas::items() const {
  nb::list found;
  for (const Part& part : parts_)
    for (uint32_t at = 0; at < part.capacity; ++at)
      if (const Entry& entry = part.entries[at]; entry.owners != 0)
        found.append(nb::make_tuple(nb::bytes(entry.name.data(), sizeof(entry.name)), sets_[entry.owners].mask));
  return found;
}

void add_replicas(nb::module_& m) {
  nb::class_<Replicas>(m, "Replicas")
      .def(nb::init<>())
      .def("add", &Replicas::add, "bit"_a, "names"_a)
      .def("remove", &Replicas::remove, "bit"_a, "names"_a)
      .def("get", &Replicas::get, "name"_a)
      .def("discard", &Replicas::discard, "part"_a, "bits"_a)
      .def("items", &Replicas::items);
}

}  // namespace headrace
