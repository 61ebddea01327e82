// What Python holds: the kernels of one instruction set and the number of threads that they may use.
#pragma once

#include <nanobind/nanobind.h>

#include "kernel_table.h"

namespace tokenmill {

struct Kernels {
  const KernelTable& table;
  int threads;
};

// Attention of one model; step and call are told to it by address.
struct Attention {
  Kernels kernels;
  AttentionShape shape;
};

using KernelsClass = nanobind::class_<Kernels>;
// Every kernel lets other Python threads run: it touches raw memory only.
using Unlocked = nanobind::call_guard<nanobind::gil_scoped_release>;

// Addresses cross the boundary as integers, from Tensor.data_ptr().
using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Each adds its methods to the class; bind_<noun>.cpp.
void bind_linear(nanobind::module_& module, KernelsClass& kernels);
void bind_attention(nanobind::module_& module);
void bind_decoder(nanobind::module_& module);
void bind_rows(KernelsClass& kernels);

}  // namespace tokenmill
