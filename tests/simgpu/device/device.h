// What the files that know torch share.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "sim.h"

namespace sim {

inline const c10::Device kOnly{c10::DeviceType::CUDA, 0};

// Random numbers: every kernel draws a seed when it is launched.
struct Numbers final : c10::GeneratorImpl {
  Numbers() : GeneratorImpl(kOnly, c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}

  void set_current_seed(uint64_t seed) override { seed_ = seed, n_drawn_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  void set_offset(uint64_t offset) override { n_drawn_ = offset; }
  uint64_t get_offset() const override { return n_drawn_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  static c10::DeviceType device_type() { return kOnly.type(); }
  void set_state(const c10::TensorImpl& state) override {
    const auto* numbers = (const uint64_t*)state.data();
    seed_ = numbers[0], n_drawn_ = numbers[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::empty({2 * sizeof(uint64_t)}, at::dtype(at::kByte).device(at::kCPU));
    auto* numbers = (uint64_t*)state.mutable_data_ptr();
    numbers[0] = seed_, numbers[1] = n_drawn_;
    return state.getIntrusivePtr();
  }
  uint64_t draw() { return seed_ * 0x9E3779B97F4A7C15ull + 0xD1B54A32D192ED03ull * ++n_drawn_; }

 private:
  GeneratorImpl* clone_impl() const override {
    auto* copy = new Numbers();
    copy->seed_ = seed_, copy->n_drawn_ = n_drawn_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val, n_drawn_ = 0;
};

struct KernelState {  // of torch, while a kernel runs: none of the caller's modes
  c10::impl::ForceDispatchKeyGuard guard{
      c10::default_included_set.remove(c10::DispatchKey::ADInplaceOrView),
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView};
};

const at::Generator& default_numbers();
c10::Allocator* memory_of_device();
at::Tensor on_host(const at::Tensor& tensor);  // the same memory as a tensor of the CPU
Touch touch_of(const at::Tensor& tensor, bool writes);

}  // namespace sim
