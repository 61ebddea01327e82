// What Python holds: the kernels of one instruction set and the number of threads that they may use.
#pragma once

#include <nanobind/nanobind.h>

#include "kernel_table.h"

namespace tokenmill {

struct Kernels {
  const KernelTable& table;
  int threads;
};

// The attention of one model. Tensors are passed to it by address.
struct Attention {
  Kernels kernels;
  AttentionShape shape;
  ContextRanks* ranks = nullptr;  // null: one rank alone
};

using KernelsClass = nanobind::class_<Kernels>;
// Kernels touch raw memory only, so they release the GIL.
using ReleaseGil = nanobind::call_guard<nanobind::gil_scoped_release>;

// Python passes addresses as integers, from Tensor.data_ptr().
using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Throw std::invalid_argument where there is no kernel.
void check_convolution(int64_t width);
void check_delta_rule(int64_t key_heads, int64_t value_heads, int64_t key_size, int64_t value_size);
void check_state_space(int64_t heads, int64_t groups, int64_t size, int64_t state_size);

// Each adds the classes or methods of its file, bind_<noun>.cpp.
void bind_linear(nanobind::module_& module, KernelsClass& kernels);
void bind_attention(nanobind::module_& module);
void bind_adapters(nanobind::module_& module);
void bind_decoder(nanobind::module_& module);
void bind_experts(nanobind::module_& module);
void bind_checksum(nanobind::module_& module);
void bind_ranks(nanobind::module_& module);
void bind_rows(KernelsClass& kernels);
void bind_recurrence(nanobind::module_& module, KernelsClass& kernels);
void bind_pages(KernelsClass& kernels);
void bind_vocabulary(nanobind::module_& module);

}  // namespace tokenmill
