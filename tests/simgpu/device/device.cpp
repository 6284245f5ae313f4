// The simulated device as torch sees it: it takes the place of CUDA, which a CPU build of
// torch leaves empty. Allocators, random numbers, hooks, and the guard of streams.
#include "device.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using sim::Sim;

namespace sim {

namespace {

constexpr size_t kTotalBytes = size_t{1} << 34;

void delete_block(void* ptr) { Sim::get().free(ptr); }

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    void* ptr = Sim::get().allocate(n, false);
    return {ptr, ptr, &delete_block, kOnly};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &delete_block; }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "the simulated device copies by kernels only");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    Sim::get().record_stream(ptr.get(), (int)stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    const auto& s = Sim::get();
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = s.allocated;
    stats.allocated_bytes[0].peak = s.peak;
    stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = s.reserved;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { Sim::get().peak = Sim::get().allocated; }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    return {kTotalBytes - (size_t)Sim::get().reserved, kTotalBytes};
  }
};

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    void* ptr = Sim::get().allocate(n, true);
    return {ptr, ptr, &delete_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &delete_block; }
  void copy_data(void* to, const void* from, size_t n) const override {
    default_copy_data(to, from, n);
  }
  bool record_event(void* ptr, void*, c10::Stream stream) override {
    Sim::get().record_stream(ptr, (int)stream.id());
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

auto* const device_memory = new DeviceMemory();
auto* const pinned_memory = new PinnedMemory();

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return kOnly; }
  bool isPinnedPtr(const void* ptr) const override {
    auto& s = Sim::get();
    std::lock_guard<std::recursive_mutex> lock(s.mutex);
    const auto* block = s.block_of(ptr);
    return block != nullptr && block->is_host;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory; }
  at::Allocator* getCUDADeviceAllocator() const override { return device_memory; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_numbers();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Numbers>();
  }
  void deviceSynchronize(c10::DeviceIndex) const override { Sim::get().wait_all(); }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(int id) { return c10::Stream(c10::Stream::UNSAFE, kOnly, id); }
  static Event& event(void* ptr) { return *(Event*)ptr; }

  c10::DeviceType type() const override { return kOnly.type(); }
  c10::Device exchangeDevice(c10::Device) const override { return kOnly; }
  c10::Device getDevice() const override { return kOnly; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream(Sim::get().current()); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream(Sim::get().new_stream());
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return stream(Sim::get().new_stream());
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return stream(Sim::get().exchange((int)to.id()));
  }
  bool queryStream(const c10::Stream& s) const override {
    return Sim::get().query_stream((int)s.id());
  }
  void synchronizeStream(const c10::Stream& s) const override {
    Sim::get().wait_stream((int)s.id(), "a stream");
  }
  bool isStreamCapturing(const c10::Stream&) const override { return false; }
  void synchronizeDevice(const c10::DeviceIndex) const override { Sim::get().wait_all(); }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& s) const override {
    Sim::get().record_stream(ptr.get(), (int)s.id());
  }

  void record(void** ptr, const c10::Stream& s, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*ptr == nullptr) *ptr = new Event();
    Sim::get().record(event(*ptr), (int)s.id());
  }
  void destroyEvent(void* ptr, const c10::DeviceIndex) const noexcept override {
    delete (Event*)ptr;
  }
  void block(void* ptr, const c10::Stream& s) const override {
    if (ptr != nullptr) Sim::get().block(event(ptr), (int)s.id());
  }
  bool queryEvent(void* ptr) const override { return ptr == nullptr || Sim::get().query(event(ptr)); }
  void synchronizeEvent(void* ptr) const override {
    if (ptr != nullptr) Sim::get().wait_event(event(ptr), "an event");
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(queryEvent(from) && queryEvent(to), "an event has not been passed yet");
    return (*event(to).time_s - *event(from).time_s) * 1e3;
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

int64_t plain_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                        const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return (int64_t)sdp::SDPBackend::math;  // of the others there are only a GPU's kernels
}

struct AtLoad {
  AtLoad() {
    c10::SetAllocator(kOnly.type(), device_memory);
    at::setHostAllocator(kOnly.type(), pinned_memory);
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&plain_attention);
  }
} at_load;

}  // namespace

c10::Allocator* memory_of_device() { return device_memory; }

const at::Generator& default_numbers() {
  static const at::Generator only = at::make_generator<Numbers>();
  return only;
}

}  // namespace sim

namespace at {
using SimulatedHooks = sim::Hooks;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", SimulatedHooks)
}  // namespace at
