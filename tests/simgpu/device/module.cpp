// For Python: settings and findings; and a simulated NCCL.
//
// A communicator is a stream: messages and collectives run there in the order of their
// launches, the host goes on. Other processes have a simulated device of their own; bytes
// go through files.
#include <Python.h>
#include <fcntl.h>
#include <frameobject.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "device.h"

namespace py = pybind11;
using at::Tensor;
using c10::intrusive_ptr;
using sim::Sim;
using Tensors = std::vector<Tensor>;
using Bytes = std::vector<std::string>;  // of each member

namespace {

bool is_rendezvous = true;  // a send ends when its receive runs: there are no buffers
std::string folder = "/dev/shm";

void write_file(const std::string& path, const char* data, size_t n) {
  const std::string part = path + ".part";
  const int file = open(part.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
  TORCH_CHECK(file >= 0 && write(file, data, n) == (ssize_t)n, "cannot write ", path);
  close(file);
  rename(part.c_str(), path.c_str());
}

bool read_file(const std::string& path, std::string& data) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return false;
  data.assign(std::istreambuf_iterator<char>(file), {});
  return true;
}

struct Fate {  // of a group's operations
  std::atomic<bool> is_aborted{false};
  double timeout_s = 600;
};

struct Failure {
  std::atomic<bool> has_failed{false};
  std::string text;
};

struct SimulatedWork final : c10d::Work {
  explicit SimulatedWork(c10d::OpType kind) : Work(-1, kind) {}
  sim::Event end;
  // Until `wait`, as torch's backends keep them; those of a message ProcessGroupNCCL
  // records on its own stream instead, which frees them no earlier.
  Tensors stash;
  std::shared_ptr<Failure> failure = std::make_shared<Failure>();

  bool isCompleted() override { return failure->has_failed || Sim::get().query(end); }
  bool isSuccess() const override { return !failure->has_failed; }
  std::exception_ptr exception() const override {
    if (!failure->has_failed) return nullptr;
    return std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, failure->text));
  }
  bool wait(std::chrono::milliseconds timeout) override {
    if (failure->has_failed) std::rethrow_exception(exception());
    synchronize();
    if (timeout != kNoTimeout) {
      Sim::get().held_up("wait of NCCL with a time-out");
      Sim::get().wait_event(end, "a message or collective");
    }
    return true;
  }
  void synchronize() override {
    Sim::get().block(end, Sim::get().current());
    stash.clear();
  }
  std::vector<Tensor> result() override { return {}; }
  intrusive_ptr<c10::ivalue::Future> getFuture() override {
    synchronize();
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
    future->markCompleted();
    return future;
  }
};

struct Communicator {
  int stream = 0;
  std::string path;
  std::vector<int> processes;  // of the members
  sim::Event last;             // behind what was started last, on whatever stream
  uint64_t n_sent = 0, n_received = 0, n_collectives = 0;
};

// The same bytes as a flat tensor of the host; kernels of collectives use them.
Tensor flat(void* at, const Tensor& like, int64_t n) {
  return at::from_blob(at, {n}, at::dtype(like.scalar_type()).device(at::kCPU));
}

struct Shape {  // what a collective needs to know of a tensor later, without keeping it
  explicit Shape(const Tensor& t) : at(t.data_ptr()), n_bytes(t.nbytes()), n(t.numel()), like(flat(at, t, n)) {}
  void* at;
  size_t n_bytes;
  int64_t n;
  Tensor like;
};

struct SimulatedNCCL final : c10d::Backend {
  struct Options final : c10d::Backend::Options {
    Options() : c10d::Backend::Options("nccl") {}
    bool is_high_priority_stream = false;
    int split_color = 0;
  };

  SimulatedNCCL(intrusive_ptr<c10d::Store> store, int rank, int size, intrusive_ptr<Options> options)
      : Backend(rank, size), store_(std::move(store)), options_(std::move(options)) {
    fate_->timeout_s = std::chrono::duration<double>(options_->timeout).count();
  }

  const std::string getBackendName() const override { return "nccl"; }
  intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    fate_->timeout_s = std::chrono::duration<double>(timeout).count();
  }
  void shutdown() override {}
  void abort() override { fate_->is_aborted = true; }

  intrusive_ptr<c10d::Work> send(Tensors& tensors, int to, int) override {
    auto& pair = communicator_with(to);
    const Tensor t = checked(tensors.at(0));
    auto operation = message("send to rank ", pair, to, rank_, pair.n_sent++);
    operation.touches = {sim::touch_of(t, false)};
    operation.run = [path = operation.message, at = (const char*)t.data_ptr(), n = t.nbytes(), is_written = false]() mutable {
      if (!is_written) write_file(path, at, n);
      is_written = true;
      return !is_rendezvous || unlink((path + ".ack").c_str()) == 0;
    };
    return start(pair, c10d::OpType::SEND, {t}, std::move(operation), true);
  }

  intrusive_ptr<c10d::Work> recv(Tensors& tensors, int from, int) override {
    auto& pair = communicator_with(from);
    const Tensor t = checked(tensors.at(0));
    auto operation = message("receive from rank ", pair, from, from, pair.n_received++);
    operation.touches = {sim::touch_of(t, true)};
    operation.run = [path = operation.message, at = t.data_ptr(), n = t.nbytes()] {
      std::string data;
      if (!read_file(path, data)) return false;
      TORCH_CHECK(data.size() == n, "a message of ", data.size(), " bytes came for one of ", n);
      std::memcpy(at, data.data(), n);
      unlink(path.c_str());
      if (is_rendezvous) write_file(path + ".ack", "", 0);
      return true;
    };
    return start(pair, c10d::OpType::RECV, {t}, std::move(operation), true);
  }

  intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const Tensor t = tensors.at(0);
    const auto root = (int)options.rootRank;
    const bool is_root = rank_ == root;
    return collective(c10d::OpType::BROADCAST, "broadcast", is_root ? Tensors{t} : Tensors{},
                      is_root ? Tensors{} : Tensors{t}, options.asyncOp,
                      [at = t.data_ptr(), root, is_root](const Bytes& every) {
                        if (!is_root) std::memcpy(at, every[root].data(), every[root].size());
                      });
  }

  intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return sum_each("allreduce", tensors, tensors, options.reduceOp, options.asyncOp);
  }
  intrusive_ptr<c10d::Work> allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return sum_each("allreduce", tensors, tensors, options.reduceOp, options.asyncOp);
  }
  intrusive_ptr<c10d::Work> _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return sum_each("reduce_scatter", {output}, {input}, options.reduceOp, options.asyncOp);
  }
  intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return sum_each("reduce_scatter", outputs, inputs, options.reduceOp, options.asyncOp);
  }

  intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                      const c10d::AllgatherOptions& options) override {
    std::vector<void*> targets;
    for (const Tensor& t : outputs.at(0)) targets.push_back(t.data_ptr());
    return collective(c10d::OpType::ALLGATHER, "allgather", {inputs.at(0)}, outputs.at(0), options.asyncOp,
                      [targets](const Bytes& every) {
                        for (size_t i = 0; i < targets.size(); i++)
                          std::memcpy(targets[i], every[i].data(), every[i].size());
                      });
  }
  intrusive_ptr<c10d::Work> _allgather_base(Tensor& output, Tensor& input,
                                            const c10d::AllgatherOptions& options) override {
    return gather_each({output}, {input}, options.asyncOp);
  }
  intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return gather_each(outputs, inputs, options.asyncOp);
  }

  intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    auto work = collective(c10d::OpType::BARRIER, "barrier", {}, {}, true, [](const Bytes&) {});
    Sim::get().wait_event(work->end, "a barrier");
    return work;
  }

 private:
  static Tensor checked(const Tensor& t) {
    TORCH_CHECK(t.is_cuda(), "NCCL takes tensors of a GPU only");
    TORCH_CHECK(t.is_contiguous(), "NCCL takes contiguous tensors only");
    return t;
  }

  // Both ends of a message name it by its sender and its number.
  sim::Operation message(const char* name, const Communicator& pair, int peer, int sender, uint64_t number) {
    sim::Operation made;
    made.name = name + std::to_string(pair.processes[peer > rank_]);
    made.message = pair.path + "_" + std::to_string(sender) + "_" + std::to_string(number);
    return made;
  }

  Communicator& communicator_with(int peer) {
    const int low = std::min(rank_, peer), high = std::max(rank_, peer);
    return communicator(std::to_string(low) + "-" + std::to_string(high), {low, high});
  }

  // To connect, all members must call: the host waits for them.
  Communicator& communicator(const std::string& key, const std::vector<int>& members) {
    if (auto found = communicators_.find(key); found != communicators_.end()) return found->second;
    const std::string base = "simulated_nccl/" + key;
    if (members.front() == rank_) {
      std::random_device draw;
      store_->set(base, folder + "/nccl_" + std::to_string(draw()) + std::to_string(draw()));
    }
    store_->set(base + "/" + std::to_string(rank_), std::to_string(Sim::get().process));
    Sim::get().host_waits("the members of a communicator, to connect");
    Communicator made;
    for (int member : members)
      made.processes.push_back(std::stoi(store_->get_to_str(base + "/" + std::to_string(member))));
    Sim::get().host_waits("");
    made.path = store_->get_to_str(base);
    made.stream = Sim::get().new_stream();
    return communicators_[key] = made;
  }

  intrusive_ptr<SimulatedWork> start(Communicator& communicator, c10d::OpType kind, const Tensors& tensors,
                                     sim::Operation operation, bool is_async) {
    auto& s = Sim::get();
    auto work = c10::make_intrusive<SimulatedWork>(kind);
    const int caller = s.current(), stream = is_async ? communicator.stream : caller;
    if (is_async) {
      sim::Event before;
      s.record(before, caller);
      s.block(before, stream);
      work->stash = tensors;
    }
    // NCCL runs what one communicator is given in this order, also on several streams. No
    // program may rely on it: the checker does not know of it.
    if (communicator.last.stream >= 0 && communicator.last.stream != stream) {
      operation.wait_stream = communicator.last.stream;
      operation.wait_number = communicator.last.number;
    }
    operation.needs_others = true;
    operation.members = communicator.processes;
    const bool fails = s.settings.fails_at > 0 && --s.settings.fails_at == 0;
    operation.run = [run = std::move(operation.run), fate = fate_, failure = work->failure,
                     name = operation.name, delay_s = s.draw_delay_s(), fails, began_s = 0.0]() mutable {
      const double now_s = sim::now_s();
      if (began_s == 0) began_s = now_s;
      if (!fails && !fate->is_aborted) {
        if (now_s - began_s < delay_s) return false;
        if (run()) return true;
      }
      const bool is_late = now_s - began_s > fate->timeout_s;
      if (!fails && !fate->is_aborted && !is_late) return false;
      failure->text = "NCCL: " + name +
          (fails ? " failed: the connection broke" : is_late ? " timed out" : " was aborted");
      failure->has_failed = true;
      return true;
    };
    s.launch(stream, std::move(operation));
    s.record(work->end, stream);
    communicator.last = work->end;
    return work;
  }

  // Everybody writes what it has, and reads what all have written.
  intrusive_ptr<SimulatedWork> collective(c10d::OpType kind, const char* name, const Tensors& inputs,
                                          const Tensors& outputs, bool is_async,
                                          std::function<void(const Bytes&)> use) {
    std::vector<int> everyone(size_);
    for (int i = 0; i < size_; i++) everyone[i] = i;
    auto& all = communicator("all", everyone);
    const uint64_t number = all.n_collectives++;
    sim::Operation operation;
    operation.name = name;
    operation.message = all.path + "_" + std::to_string(number);
    std::vector<Shape> parts;
    for (const Tensor& t : inputs) {
      operation.touches.push_back(sim::touch_of(checked(t), false));
      parts.emplace_back(t);
    }
    for (const Tensor& t : outputs) operation.touches.push_back(sim::touch_of(checked(t), true));
    auto file = [path = all.path](uint64_t collective, int rank) {
      return path + "_" + std::to_string(collective) + "_" + std::to_string(rank);
    };
    operation.run = [=, rank = rank_, size = size_, is_written = false]() mutable {
      if (!is_written) {
        std::string data;
        for (const Shape& part : parts) data.append((const char*)part.at, part.n_bytes);
        write_file(file(number, rank), data.data(), data.size());
        is_written = true;
      }
      Bytes every(size);
      for (int i = 0; i < size; i++)
        if (!read_file(file(number, i), every[i])) return false;
      sim::KernelState state;
      use(every);
      if (number > 0) unlink(file(number - 1, rank).c_str());  // all have read it: they came here
      return true;
    };
    Tensors kept = inputs;
    kept.insert(kept.end(), outputs.begin(), outputs.end());
    return start(all, kind, kept, std::move(operation), is_async);
  }

  static void fold(Tensor& sum, const Tensor& x, const c10d::ReduceOp& how) {
    if (how == c10d::ReduceOp::MAX) at::maximum_out(sum, sum, x);
    else if (how == c10d::ReduceOp::MIN) at::minimum_out(sum, sum, x);
    else if (how == c10d::ReduceOp::SUM || how == c10d::ReduceOp::AVG) sum.add_(x);
    else TORCH_CHECK(false, "the simulated NCCL sums, averages, and takes extremes");
  }

  // Each output is the sum of this member's part of the input, the whole of equal sizes.
  intrusive_ptr<SimulatedWork> sum_each(const char* name, const Tensors& outputs, const Tensors& inputs,
                                        c10d::ReduceOp how, bool is_async) {
    std::vector<Shape> targets, sources;
    for (const Tensor& t : outputs) targets.emplace_back(t);
    for (const Tensor& t : inputs) sources.emplace_back(t);
    auto use = [=, rank = rank_](const Bytes& every) {
      size_t offset = 0;
      for (size_t k = 0; k < targets.size(); k++) {
        Tensor out = targets[k].like;
        const size_t begin = sources[k].n == targets[k].n ? 0 : rank * targets[k].n_bytes;
        auto part = [&](size_t member) {
          return flat((void*)(every[member].data() + offset + begin), out, targets[k].n);
        };
        Tensor sum = part(0).clone();
        for (size_t i = 1; i < every.size(); i++) fold(sum, part(i), how);
        if (how == c10d::ReduceOp::AVG) sum.div_((int64_t)every.size());
        out.copy_(sum);
        offset += sources[k].n_bytes;
      }
    };
    return collective(c10d::OpType::ALLREDUCE, name, inputs, outputs, is_async, use);
  }

  intrusive_ptr<SimulatedWork> gather_each(const Tensors& outputs, const Tensors& inputs, bool is_async) {
    std::vector<std::pair<char*, size_t>> targets;
    for (size_t k = 0; k < outputs.size(); k++)
      targets.emplace_back((char*)outputs[k].data_ptr(), inputs[k].nbytes());
    auto use = [targets](const Bytes& every) {
      for (size_t i = 0; i < every.size(); i++) {
        size_t offset = 0;
        for (const auto& [at, n] : targets) {
          std::memcpy(at + i * n, every[i].data() + offset, n);
          offset += n;
        }
      }
    };
    return collective(c10d::OpType::_ALLGATHER_BASE, "allgather", inputs, outputs, is_async, use);
  }

  intrusive_ptr<c10d::Store> store_;
  intrusive_ptr<Options> options_;
  std::shared_ptr<Fate> fate_ = std::make_shared<Fate>();
  std::map<std::string, Communicator> communicators_;
};

// A process's streams go on while its host does something else.
void start_pump() {
  static std::atomic<bool> is_started{false};
  if (is_started.exchange(true)) return;
  std::thread([] {
    while (true)
      if (!Sim::get().pump()) std::this_thread::sleep_for(std::chrono::microseconds(300));
  }).detach();
}

// The innermost line of Python that is neither torch's nor this device's own.
std::string call_site() {
  if (!Py_IsInitialized()) return "";
  const PyGILState_STATE gil = PyGILState_Ensure();
  std::string site = "no line of Python (autograd)";
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame != nullptr) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    const std::string text = file == nullptr ? "" : file;
    const bool is_inner = text.find("/torch/") != std::string::npos || text.find("/simgpu/__init__") != std::string::npos || text.find("/simgpu/cuda") != std::string::npos || text[0] == '<';
    if (!is_inner) {
      size_t cut = text.rfind('/');
      if (cut != std::string::npos && cut > 0) cut = text.rfind('/', cut - 1);
      const char* function = PyUnicode_AsUTF8(code->co_name);
      site = text.substr(cut == std::string::npos ? 0 : cut + 1) + ":" +
          std::to_string(PyFrame_GetLineNumber(frame)) + " " + (function == nullptr ? "" : function);
    }
    Py_DECREF(code);
    PyFrameObject* outer = is_inner ? PyFrame_GetBack(frame) : nullptr;
    Py_DECREF(frame);
    frame = outer;
  }
  PyGILState_Release(gil);
  return site;
}

void configure(const std::string& name, double value) {
  auto& s = Sim::get();
  std::lock_guard<std::recursive_mutex> lock(s.mutex);
  auto& to = s.settings;
  if (name == "policy") to.policy = (sim::Policy)(int)value;
  else if (name == "queues") to.queues = (int)value;
  else if (name == "n_streams") to.n_streams = (int)value;
  else if (name == "n_running") to.n_running = (int)value;
  else if (name == "sync_mode") to.sync_mode = (int)value;
  else if (name == "patience_s") to.patience_s = value;
  else if (name == "delay_s") to.delay_s = value;
  else if (name == "fails_at") to.fails_at = (int)value;
  else if (name == "rendezvous") is_rendezvous = value != 0;
  else TORCH_CHECK(false, "the simulated device has no setting ", name);
}

}  // namespace

PYBIND11_MODULE(_simgpu, m) {
  py::module_::import("torch._C._distributed_c10d");
  Sim::get().call_site = &call_site;
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  auto& s = Sim::get();

  m.def("configure", &configure, no_gil);
  m.def("begin", [&](uint64_t seed) { s.begin(seed); }, no_gil);
  m.def("label", [&](const std::string& text) {
    std::lock_guard<std::recursive_mutex> lock(s.mutex);
    s.set_label(text);
  }, no_gil);
  m.def("reports", [&] { return s.reports; });
  m.def("allocate", [&](size_t bytes) { return (uintptr_t)s.allocate(bytes, false); }, no_gil);
  m.def("free", [&](uintptr_t address) { s.free((void*)address); }, no_gil);
  m.def("live", [&] { return s.live(); }, no_gil);
  m.def("counts", [&] { return s.counts; });
  m.def("waits", [&] {
    std::map<std::tuple<std::string, std::string, std::string>, int64_t> made;
    for (const auto& [key, n] : s.waits) {
      const auto& [what, label, site] = key;
      made[{what, s.names.text(label), s.names.text(site)}] = n;
    }
    return made;
  });
  m.def("digest", [&] { return s.digest; });
  m.def("synchronize", [&] { s.wait_all(); }, no_gil);
  m.def("current_stream", [&] { return s.current(); });
  m.def("default_generator", [] {
    return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(sim::default_numbers()));
  });

  // torch does this itself in builds for CUDA only; fully_shard frees and refills by it.
  m.def("resize_storage", [](const Tensor& whole, int64_t n_bytes) {
    auto* storage = whole.storage().unsafeGetStorageImpl();
    if (n_bytes > 0) {
      whole.resize_({n_bytes});
    } else {
      storage->set_data_ptr_noswap(c10::DataPtr(nullptr, sim::kOnly));
      storage->set_nbytes(0);
    }
  }, no_gil);

  m.def("use_processes", [&](const std::string& files, int number, int n) {
    folder = files;
    s.process = number;
    s.stuck_files = files + "/stuck_";
    s.settings.n_processes = n;
    start_pump();
  });
  auto group = py::class_<SimulatedNCCL, c10d::Backend, intrusive_ptr<SimulatedNCCL>>(m, "ProcessGroupNCCL");
  using Options = SimulatedNCCL::Options;
  py::class_<Options, c10d::Backend::Options, intrusive_ptr<Options>>(group, "Options")
      .def(py::init([](bool is_high_priority_stream) {
             auto made = c10::make_intrusive<Options>();
             made->is_high_priority_stream = is_high_priority_stream;
             return made;
           }),
           py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &Options::is_high_priority_stream)
      .def_property("split_from", [](const Options&) { return py::none(); },
                    [](Options&, const py::object&) {})  // nothing is split here
      .def_readwrite("split_color", &Options::split_color);
  group.def(py::init<intrusive_ptr<c10d::Store>, int, int, intrusive_ptr<Options>>(), no_gil);
}
