// Splitting the rows of an element-wise operation over the worker pool.
#pragma once

#include <algorithm>
#include <cstdint>

#include "raymoe/worker_pool.h"

namespace raymoe {

/// Calls body(begin, end) for ranges of rows that cover [0, num_rows) once. `row_cost` is the work
/// of a row in elements; less than about ten microseconds of work stays on the calling thread.
template <typename Body>
void for_row_ranges(int64_t num_rows, int64_t row_cost, const Body& body) {
  constexpr int64_t kChunkCost = 16384;
  if (num_rows <= 0) return;
  const int64_t rows = std::max<int64_t>(1, kChunkCost / std::max<int64_t>(row_cost, 1));
  const int64_t chunks = (num_rows + rows - 1) / rows;
  if (chunks == 1 || num_rows * row_cost <= 2 * kChunkCost) return body(int64_t{0}, num_rows);
  worker_pool()->for_each(chunks, 1, [&](int, int64_t chunk) {
    body(chunk * rows, std::min((chunk + 1) * rows, num_rows));
  });
}

}  // namespace raymoe
