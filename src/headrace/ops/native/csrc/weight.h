// Weights as the kernels read them.
#pragma once

#include <vector>

#include "kernels.h"
#include "memory.h"
#include "pool.h"

namespace headrace {

WeightType weight_type(const std::string& name);

// Of a block as files store it, of as many values as a record has inputs. Floats have no blocks.
size_t block_bytes(WeightType type);

// Throws Fault unless `order` has each of 0 to count - 1 once.
void check_order(const std::vector<int32_t>& order, int count);

// A matrix [rows outputs, cols inputs] in panels of 16 outputs; see kernels.h for their layout.
class Weight {
 public:
  // `data` holds exactly the rows as files store them; it is copied. `order` is empty, or names the input that each
  // column belongs to.
  Weight(ThreadPool& pool, WeightType type, int rows, int cols, const std::byte* data, size_t bytes,
         std::vector<int32_t> order = {});

  WeightType type() const { return type_; }
  int rows() const { return rows_; }
  int cols() const { return cols_; }
  int num_panels() const { return (rows_ + kLanes - 1) / kLanes; }
  size_t panel_bytes() const { return panel_bytes_; }
  const std::byte* panel(int index) const { return pages_.data() + index * panel_bytes_; }
  size_t bytes() const { return pages_.bytes(); }
  const std::vector<int32_t>& order() const { return order_; }

  void copy_row(const Kernels& kernels, int row, float* out) const {
    kernels.weight_row(type_, panel(row / kLanes), row % kLanes, cols_, out);
  }
  std::vector<float> first_row(const Kernels& kernels) const {
    std::vector<float> row((cols_ + kLanes - 1) / kLanes * kLanes);
    copy_row(kernels, 0, row.data());
    return row;
  }

 private:
  WeightType type_;
  int rows_, cols_;
  size_t panel_bytes_;
  Pages pages_;
  std::vector<int32_t> order_;
};

}  // namespace headrace
