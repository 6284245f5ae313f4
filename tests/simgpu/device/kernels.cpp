// Kernels: those of the CPU, later, on the bytes that they were launched with.
//
// Nothing keeps the memory of arguments alive but what keeps it on a GPU: a kernel sees
// raw pointers. Outputs exist at once; their looks come from a dry run of the CPU's kernel
// on zeros, once for each kind of call, which also raises the caller's mistakes.
#include "device.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using sim::KernelState;
using sim::Operation;
using sim::Sim;
using sim::kOnly;
using sim::on_host;
using sim::touch_of;
using torch::jit::Stack;

namespace sim {

Tensor on_host(const Tensor& t) {
  Tensor made = at::from_blob(t.numel() ? t.data_ptr() : nullptr, t.sizes(), t.strides(),
                              t.options().device(at::kCPU).requires_grad(false));
  if (t.unsafeGetTensorImpl()->is_wrapped_number())
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

Touch touch_of(const Tensor& t, bool writes) {
  if (t.numel() == 0) return {0, 0, writes};
  const auto low = (uintptr_t)t.data_ptr();
  int64_t extent = 1;
  for (int64_t i = 0; i < t.dim(); i++) extent += (t.size(i) - 1) * t.stride(i);
  std::ostringstream look;
  look << c10::toString(t.scalar_type()) << t.sizes();
  return {low, low + extent * t.element_size(), writes, look.str()};
}

}  // namespace sim

namespace {

bool is_on(const Tensor& t) { return t.defined() && t.device().type() == kOnly.type(); }

template <class F>
IValue mapped(const IValue& value, const F& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& t : value.toTensorVector()) made.push_back(f(t));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& t : value.toOptionalTensorList())
      made.push_back(t ? std::optional<Tensor>(f(*t)) : std::nullopt);
    return made;
  }
  return value;
}

template <class F>
void for_each(const IValue& value, const F& f) {
  mapped(value, [&](const Tensor& t) {
    f(t);
    return t;
  });
}

bool holds_tensors(const IValue& value) {
  return value.isTensor() || value.isTensorList() || value.isOptionalTensorList();
}

std::string look_of(const IValue& value) {
  std::ostringstream text;
  text << "|";
  if (!holds_tensors(value)) text << value;
  else
    for_each(value, [&](const Tensor& t) {
      if (t.defined())
        text << (int)t.scalar_type() << t.sizes() << t.strides()
             << t.unsafeGetTensorImpl()->is_wrapped_number();
      text << ";";
    });
  return text.str();
}

// The host must know the data before it knows the result's size, as on a GPU.
bool is_sized_by_data(const std::string& name, const Stack& arguments) {
  static const std::unordered_set<std::string> names{
      "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::_unique",
      "aten::unique_consecutive", "aten::unique_dim", "aten::bincount", "aten::repeat_interleave",
      "aten::is_set_to", "aten::_assert_async", "aten::histc"};
  if (names.count(name)) return true;
  bool has_mask = false;
  if (name == "aten::index" && arguments.size() > 1)
    for_each(arguments[1], [&](const Tensor& t) {
      has_mask |= t.defined() && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte);
    });
  return has_mask;
}

class Launch {
 public:
  Launch(const c10::OperatorHandle& op, Stack& stack)
      : op_(op), schema_(op.schema()), stack_(stack), n_(schema_.arguments().size()),
        given_(stack.end() - n_, stack.end()), is_seeded_(op.hasTag(at::Tag::nondeterministic_seeded)) {
    operation_.name = schema_.name().substr(schema_.name().find(':') + 2);
  }

  void run() {
    read_arguments();
    if (is_sized_by_data(schema_.name(), given_)) run_at_once();
    else {
      size_outputs();
      make_results();
      launch();
    }
    stack_.erase(stack_.end() - n_, stack_.end());
    for (IValue& result : results_) stack_.push_back(std::move(result));
  }

 private:
  const c10::AliasInfo* alias(size_t i) const { return schema_.arguments()[i].alias_info(); }
  bool writes(size_t i) const { return alias(i) != nullptr && alias(i)->isWrite(); }

  void read_arguments() {
    for (size_t i = 0; i < n_; i++) {
      if (given_[i].isDevice()) {
        cpu_.emplace_back(c10::Device(c10::kCPU));
      } else if (given_[i].isGenerator()) {
        auto* numbers = dynamic_cast<sim::Numbers*>(given_[i].toGenerator().unsafeGetGeneratorImpl());
        if (numbers != nullptr) seed_ = numbers->draw();
        cpu_.emplace_back();
      } else {
        cpu_.push_back(mapped(given_[i], [&](const Tensor& t) { return argument(t, i); }));
      }
    }
    if (is_seeded_ && !seed_)
      seed_ = ((sim::Numbers*)sim::default_numbers().unsafeGetGeneratorImpl())->draw();
  }

  Tensor argument(const Tensor& t, size_t i) {
    if (!t.defined()) return t;
    if (is_on(t)) {
      operation_.touches.push_back(touch_of(t, writes(i)));
      return on_host(t);
    }
    TORCH_CHECK(!writes(i), op_.schema(), " writes to a tensor of the host");
    Tensor copy = t.clone();  // the host's tensors are read at the launch
    if (t.unsafeGetTensorImpl()->is_wrapped_number())
      copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }

  // Calls the CPU's kernel; one seed gives one result, whenever it runs.
  static void call(const c10::OperatorHandle& op, std::optional<uint64_t> seed, Stack& stack) {
    KernelState state;
    if (!seed) {
      op.callBoxed(stack);
      return;
    }
    // Not all kernels take a generator: the CPU's own is lent to them.
    at::Generator numbers = at::detail::getDefaultCPUGenerator();
    const Tensor before = numbers.get_state();
    numbers.set_current_seed(*seed);
    op.callBoxed(stack);
    numbers.set_state(before);
  }

  void run_at_once() {
    auto& s = Sim::get();
    s.held_up(operation_.name.c_str());
    s.wait_stream(s.current(), operation_.name.c_str());
    call(op_, seed_, cpu_);
    for (const IValue& made : cpu_)
      results_.push_back(mapped(made, [](const Tensor& t) { return t.defined() ? t.to(kOnly) : t; }));
  }

  Stack run_dry(Stack* arguments = nullptr) {
    Stack stack;
    for (const IValue& value : cpu_)
      stack.push_back(mapped(value, [&](const Tensor& t) {
        if (!t.defined() || t.unsafeGetTensorImpl()->is_wrapped_number()) return t;
        KernelState state;
        return at::empty_strided(t.sizes(), t.strides(), t.options()).zero_();
      }));
    if (arguments != nullptr) *arguments = stack;
    call(op_, seed_, stack);
    return stack;
  }

  // Outputs that are handed over empty get their size: ``out=``.
  void size_outputs() {
    bool is_empty = false;
    for (size_t i = 0; i < n_; i++)
      is_empty |= schema_.arguments()[i].is_out() && given_[i].isTensor() && given_[i].toTensor().numel() == 0;
    if (!is_empty) return;
    Stack dry;
    run_dry(&dry);
    for (size_t i = 0; i < n_; i++) {
      if (!schema_.arguments()[i].is_out() || !dry[i].isTensor()) continue;
      const Tensor& out = given_[i].toTensor();
      if (out.sizes() == dry[i].toTensor().sizes()) continue;
      out.resize_(dry[i].toTensor().sizes());
      cpu_[i] = on_host(out);
      operation_.touches.push_back(touch_of(out, true));
    }
  }

  Stack looks() {
    static std::unordered_map<std::string, Stack> known;
    static std::mutex mutex;
    std::string key = schema_.name() + "." + schema_.overload_name();
    for (const IValue& value : cpu_) key += look_of(value);
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (auto found = known.find(key); found != known.end()) return found->second;
    }
    Sim::get().note("dry runs for shapes");
    Stack made;
    for (const IValue& value : run_dry())
      made.push_back(mapped(value, [](const Tensor& t) {
        KernelState state;
        return t.defined()
            ? at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta)) : t;
      }));
    std::lock_guard<std::mutex> lock(mutex);
    return known[key] = made;
  }

  // Results: arguments that are written to, or new tensors that look as the dry run's.
  void make_results() {
    Stack looks_of_new;
    for (size_t j = 0; j < schema_.returns().size(); j++) {
      const auto* info = schema_.returns()[j].alias_info();
      if (info != nullptr) {
        TORCH_CHECK(info->isWrite(), "the simulated device has no ", op_.schema());
        results_.push_back(written_argument(*info));
        continue;
      }
      if (looks_of_new.empty()) looks_of_new = looks();
      TORCH_CHECK(holds_tensors(looks_of_new[j]) || looks_of_new[j].isNone(),
                  "the simulated device cannot return from ", op_.schema());
      std::vector<Tensor> targets;
      results_.push_back(mapped(looks_of_new[j], [&](const Tensor& t) {
        Tensor made = t.defined()
            ? at::empty_strided(t.sizes(), t.strides(), t.options().device(kOnly)) : t;
        targets.push_back(t.defined() ? on_host(made) : t);
        if (t.defined()) operation_.touches.push_back(touch_of(made, true));
        return made;
      }));
      targets_.emplace_back(j, std::move(targets));
    }
  }

  IValue written_argument(const c10::AliasInfo& info) const {
    for (size_t i = 0; i < n_; i++)
      if (alias(i) != nullptr && alias(i)->beforeSets() == info.beforeSets()) return given_[i];
    TORCH_CHECK(false, "what does ", op_.schema(), " return?");
  }

  void launch() {
    std::vector<size_t> outs;  // kernels may resize them meanwhile: they get their own
    for (size_t i = 0; i < n_; i++)
      if (schema_.arguments()[i].is_out() && cpu_[i].isTensor()) outs.push_back(i);
    operation_.run = [op = op_, seed = seed_, cpu = cpu_, targets = targets_, outs] {
      Stack stack = cpu;
      std::vector<Tensor> filled;
      for (size_t i : outs) {
        filled.push_back(at::empty({0}, cpu[i].toTensor().options()));
        stack[i] = filled.back();
      }
      call(op, seed, stack);
      KernelState state;
      for (size_t k = 0; k < outs.size(); k++) cpu[outs[k]].toTensor().copy_(filled[k]);
      for (const auto& [j, made] : targets) {
        size_t k = 0;
        for_each(stack[j], [&, &made = made](const Tensor& t) {
          if (t.defined() && made[k].defined()) made[k].copy_(t);
          k++;
        });
      }
      return true;
    };
    Sim::get().launch(Sim::get().current(), std::move(operation_));
  }

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  Stack& stack_;
  const size_t n_;
  const Stack given_;
  const bool is_seeded_;
  std::optional<uint64_t> seed_;
  Stack cpu_, results_;
  std::vector<std::pair<size_t, std::vector<Tensor>>> targets_;
  Operation operation_;
};

void run_later(const c10::OperatorHandle& op, Stack* stack) { Launch(op, *stack).run(); }

// ---- The few kernels that are about memory.

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, sim::memory_of_device(), c10::DispatchKeySet(DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, sim::memory_of_device(),
                                           c10::DispatchKeySet(DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

void launch_copy(const char* name, const Tensor& to, const Tensor& from, std::vector<sim::Touch> touches) {
  Operation operation;
  operation.name = name;
  operation.touches = std::move(touches);
  operation.run = [to, from] {
    KernelState state;
    to.copy_(from);
    return true;
  };
  Sim::get().launch(Sim::get().current(), std::move(operation));
}

void hold_up(const char* what) {
  auto& s = Sim::get();
  s.held_up(what);
  s.wait_stream(s.current(), what);
}

void copy_to_device(const Tensor& to, const Tensor& from, bool non_blocking) {
  if (from.is_pinned()) {
    Sim::get().record_stream(from.data_ptr(), Sim::get().current());
    launch_copy("copy to device", on_host(to), on_host(from), {touch_of(from, false), touch_of(to, true)});
  } else {
    if (non_blocking) Sim::get().note("copies from memory that is not pinned");
    launch_copy("copy to device", on_host(to), from.clone(), {touch_of(to, true)});
  }
  if (!non_blocking) hold_up("copy to device");
}

void copy_to_host(const Tensor& to, const Tensor& from, bool non_blocking) {
  const bool is_pinned = to.is_pinned();
  std::vector<sim::Touch> touches{touch_of(from, false)};
  if (is_pinned) {
    touches.push_back(touch_of(to, true));
    Sim::get().record_stream(to.data_ptr(), Sim::get().current());
  } else if (non_blocking) {
    Sim::get().note("copies to memory that is not pinned");
  }
  launch_copy("copy to host", on_host(to), on_host(from), touches);
  if (!non_blocking || !is_pinned) hold_up("copy to host");
}

Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  if (self.numel() == 0) return self;
  if (is_on(self) && is_on(from))
    launch_copy("copy_", on_host(self), on_host(from), {touch_of(from, false), touch_of(self, true)});
  else if (is_on(self)) copy_to_device(self, from, non_blocking);
  else copy_to_host(self, from, non_blocking);
  return self;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  to.copy_(self);
  return to;
}

at::Scalar local_scalar(const Tensor& self) {
  hold_up("item");
  return on_host(self).item();
}

Tensor as_strided(const Tensor& self, at::SymIntArrayRef size, at::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}

Tensor view(const Tensor& self, at::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, at::SymIntArrayRef size, at::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

const Tensor& resize_(const Tensor& self, at::SymIntArrayRef symbolic, std::optional<at::MemoryFormat>) {
  const auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  auto* impl = self.unsafeGetTensorImpl();
  auto* storage = self.storage().unsafeGetStorageImpl();
  const size_t bytes = (impl->storage_offset() + c10::multiply_integers(size)) * self.element_size();
  const size_t old_bytes = storage->nbytes();
  if (old_bytes < bytes) {
    auto memory = sim::memory_of_device()->allocate(bytes);
    if (old_bytes > 0) {
      const auto options = at::dtype(at::kByte).device(at::kCPU);
      const auto from = (uintptr_t)storage->data(), to = (uintptr_t)memory.get();
      launch_copy("resize_", at::from_blob((void*)to, {(int64_t)old_bytes}, options),
                  at::from_blob((void*)from, {(int64_t)old_bytes}, options),
                  {{from, from + old_bytes, false}, {to, to + old_bytes, true}});
    }
    storage->set_data_ptr(std::move(memory));
    storage->set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(size);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, at::SymIntArrayRef size,
                    at::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset.guard_int(__FILE__, __LINE__),
                                      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }

Tensor& set_whole_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }

void record_stream(Tensor& self, at::Stream stream) {
  Sim::get().record_stream(self.storage().data(), (int)stream.id());
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_later>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("record_stream", record_stream);
}
