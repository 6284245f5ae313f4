// What runs when: launches, events, and the host's waits.
#include "sim.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

namespace sim {

namespace {

using Lock = std::unique_lock<std::recursive_mutex>;

thread_local int t_current = 0;
std::atomic<int> n_threads{0};
thread_local const int t_host = n_threads++;
thread_local int t_polls = 0;  // of this host's thread, in vain, with no launch in between
thread_local uint64_t t_polled_at = 0;

// What the host is told must not depend on how fast other processes are. So an event that
// they decide is not ready until the host has waited for it; or until it does nothing
// but ask: then the answer waits for the event, so long that the host's time-outs work.
constexpr int kPollsInVain = 3;
constexpr double kAnswerS = 2;
constexpr double kQuietS = 2e-3;

std::string quoted(const std::string& text) {
  std::string made = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') made += '\\';
    made += c == '\n' ? ' ' : c;
  }
  return made + "\"";
}

}  // namespace

double now_s() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

int Names::number(const std::string& text) {
  auto [at, is_new] = numbers_.try_emplace(text, (int)texts_.size());
  if (is_new) texts_.push_back(text);
  return at->second;
}

Sim& Sim::get() {
  static Sim* only = [] {
    auto* made = new Sim();
    made->stream(0);
    if (const char* n = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS")) made->settings.queues = std::atoi(n);
    made->begin(0);
    return made;
  }();
  return *only;
}

void Sim::begin(uint64_t seed) {
  wait_all();
  {
    Lock lock(mutex);
    while (!freed_.empty()) look_at_freed();
    for (auto& s : streams_) poison_freed(*s);
  }
  wait_all();
  Lock lock(mutex);
  stream(settings.n_streams);
  next_stream_ = 0;
  draws_.seed(3 * seed);
  order_.seed(3 * seed + 1);
  looks_.seed(3 * seed + 2);
  delays_.seed(~seed);
  reports.clear(), said_.clear(), counts.clear(), waits.clear();
  digest = 0;
  label_ = 0;
  is_stuck_ = false;
  moves();
}

// To be called without the lock: a thread that holds Python's may wait for this one.
std::string Sim::site() { return call_site ? call_site() : ""; }

void Sim::mix(const std::string& text, uint64_t number) {
  digest = (digest ^ std::hash<std::string>{}(text) ^ number) * 0x9E3779B97F4A7C15ull;
  digest ^= digest >> 29;
}

double Sim::draw_delay_s() {
  Lock lock(mutex);
  return settings.delay_s * (double)(delays_() % 1000) / 1000;
}

Stream& Sim::stream(int id) {
  while ((int)streams_.size() <= id) {
    streams_.push_back(std::make_unique<Stream>());
    streams_.back()->id = (int)streams_.size() - 1;
  }
  return *streams_[id];
}

int Sim::current() { return t_current; }

int Sim::exchange(int id) {
  std::swap(id, t_current);
  return id;
}

int Sim::new_stream() {
  Lock lock(mutex);
  next_stream_ = next_stream_ % settings.n_streams + 1;
  return stream(next_stream_).id;
}

static void join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

void Sim::launch(int id, Operation operation) {
  const std::string where = site();
  Lock lock(mutex);
  operation.site = names.number(where);
  enqueue(id, std::move(operation));
}

uint64_t Sim::enqueue(int id, Operation operation) {
  Stream& s = stream(id);
  if (!operation.only_orders) poison_freed(s);
  operation.label = label_;
  join(s.clock, host_);
  const uint64_t number = ++s.launched;
  if ((int)s.clock.size() <= id) s.clock.resize(id + 1);
  s.clock[id] = number;
  if (s.others_from == 0 &&
      (operation.needs_others ||
       (operation.wait_stream >= 0 && ends_by_others(operation.wait_stream, operation.wait_number))))
    s.others_from = number;
  last_launch_s_ = operation.launched_s = now_s();
  if (!operation.by_allocator) mix(operation.name, 31 * id + operation.label);
  check(id, number, operation);
  if (settings.queues > 0) {
    queues_.resize(settings.queues);
    queues_[id % settings.queues].push_back({id, number});
  }
  s.queue.push_back(std::move(operation));
  protect_touched(s.queue.back(), false);
  counts["launches"]++;
  n_launched_++;
  waiting_.erase(t_host);
  moves();
  after_launch();
  return number;
}

bool Sim::ends_by_others(int id, uint64_t number) {
  Stream& s = stream(id);
  return s.others_from != 0 && s.others_from <= number && s.seen < number;
}

// A stream may use freed memory again from its next operation on: this is when others must
// have done with it, and when it is spoiled for those that have not.
void Sim::poison_freed(Stream& s) {
  for (Operation& operation : std::exchange(s.poisons, {}))
    enqueue(s.id, std::move(operation));
}

void Sim::after_launch() {
  if (settings.policy == Policy::lazy) return;
  if (settings.policy == Policy::eager) {
    while (progress()) {
    }
    return;
  }
  while (order_() % 3 == 0 && progress()) {
  }
}

bool Sim::can_start(Stream& s) {
  if (s.queue.empty()) return false;
  Operation& head = s.queue.front();
  if (head.started) return true;
  if (head.wait_stream >= 0 && stream(head.wait_stream).done < head.wait_number) return false;
  if (settings.n_running > 0 && n_running_ >= settings.n_running) return false;
  if (settings.queues > 0) {
    auto& queue = queues_[s.id % settings.queues];
    if (!queue.empty()) {
      if (queue.front() != std::pair<int, uint64_t>{s.id, s.done + 1}) return false;
      queue.pop_front();
    }
  }
  return true;
}

bool Sim::run_head(Stream& s) {
  if (!can_start(s)) return false;
  Operation& head = s.queue.front();
  if (!head.started) n_running_++;
  head.started = true;
  double start = std::max(s.time_s, head.launched_s);
  if (head.wait_stream >= 0) start = std::max(start, stream(head.wait_stream).time_s);
  const double began_s = now_s();
  if (head.run) {
    protect_touched(head, true);
    try {
      if (!head.run()) return false;
    } catch (const std::exception& error) {
      say("kernel failed: " + head.name + " in [" + names.text(head.label) + "] at " +
          names.text(head.site) + ": " + error.what());
    }
  }
  n_running_--;
  s.time_s = start + (head.run ? now_s() - began_s : 0);
  s.done++;
  Operation ended = std::move(head);
  s.queue.pop_front();
  protect_touched(ended, false);
  last_progress_s_ = now_s();
  moves();
  return true;
}

bool Sim::progress() {
  Lock lock(mutex);
  const size_t n = streams_.size(), first = order_() % n;
  for (size_t i = 0; i < n; i++)
    if (run_head(*streams_[(first + i) % n])) return true;
  return false;
}

bool Sim::demand(int id, uint64_t number) {
  Stream& s = stream(id);
  while (s.done < number) {
    const Operation& head = s.queue.front();
    if (head.wait_stream >= 0 && !demand(head.wait_stream, head.wait_number)) return false;
    if (!run_head(s)) return false;
  }
  return true;
}

bool Sim::pump() {
  const double now = now_s();
  if (now - last_launch_s_ < kQuietS) return false;
  if (progress()) return true;
  Lock lock(mutex);
  const bool is_idle = waiting_.empty() && std::all_of(
      streams_.begin(), streams_.end(), [](auto& s) { return s->queue.empty(); });
  if (is_idle) last_progress_s_ = now;
  const double since = std::max(last_progress_s_, last_launch_s_);
  if (!is_idle && now - since > settings.patience_s) is_stuck();
  return false;
}

void Sim::host_learns(const Clock& clock) {
  join(host_, clock);
  for (size_t i = 0; i < clock.size(); i++) {
    Stream& s = *streams_[i];
    if (clock[i] <= s.seen) continue;
    s.seen = clock[i];
    if (s.others_from != 0 && s.others_from <= s.seen)
      s.others_from = s.launched > s.seen ? s.seen + 1 : 0;
  }
  for (auto at = protected_.begin(); at != protected_.end();) protect(**at++);
}

void Sim::wait_for(int id, uint64_t number, const Clock& clock, const char* what) {
  const std::string where = site();
  Lock lock(mutex);
  if (stream(id).seen < number) waits[{what, label_, names.number(where)}]++;
  waiting_[t_host] = {what, id, number, label_};
  double since = now_s();
  while (!demand(id, number)) {
    if (progress()) {
      since = now_s();
      continue;
    }
    // A wait for a process that is gone has no other end.
    const double waited_s = now_s() - since, patience_s = settings.patience_s;
    if (waited_s > patience_s * (settings.n_processes > 1 ? 4 : 1) ||
        (waited_s > patience_s && is_stuck()))
      throw std::runtime_error("the simulated device is stuck: the host waits in [" +
                               names.text(label_) + "] for " + what + " of stream " +
                               std::to_string(id) + "\n" + state());
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    lock.lock();
  }
  waiting_.erase(t_host);
  host_learns(clock);
  if (settings.policy == Policy::random)
    while (order_() % 2 == 0 && progress()) {
    }
}

void Sim::record(Event& event, int id, bool by_allocator) {
  Lock lock(mutex);
  auto time_s = std::make_shared<double>(0.0);
  Operation mark;
  mark.name = "event";
  mark.only_orders = true;
  mark.by_allocator = by_allocator;
  mark.run = [this, id, time_s] {
    *time_s = stream(id).time_s;
    return true;
  };
  event.number = enqueue(id, std::move(mark));
  event.stream = id;
  event.clock = stream(id).clock;
  event.time_s = time_s;
}

void Sim::block(const Event& event, int id) {
  Lock lock(mutex);
  Stream& s = stream(id);
  if (event.stream == Event::never) return;
  if (event.stream != id) {
    Operation wait;
    wait.name = "wait";
    wait.only_orders = true;
    wait.wait_stream = event.stream;
    wait.wait_number = event.number;
    enqueue(id, std::move(wait));
  }
  join(s.clock, event.clock);
}

bool Sim::query(const Event& event) {
  Lock lock(mutex);
  if (event.stream < 0) return true;
  counts["queries"]++;
  Stream& s = stream(event.stream);
  bool is_done = s.seen >= event.number;
  const bool by_others = settings.n_processes > 1 && ends_by_others(event.stream, event.number);
  if (!is_done && by_others) {
    is_done = comes_from_others(event);
    if (!is_done) return false;
  } else if (!is_done && settings.policy == Policy::eager) {
    is_done = demand(event.stream, event.number);
  } else if (!is_done && draws_() % 4 == 0) {
    is_done = demand(event.stream, event.number);
  }
  mix("query", is_done);
  if (is_done) host_learns(event.clock);
  return is_done;
}

bool Sim::comes_from_others(const Event& event) {
  if (t_polled_at != n_launched_) t_polls = 0;
  t_polled_at = n_launched_;
  if (++t_polls <= kPollsInVain) return false;
  if (is_stuck_) throw std::runtime_error("the simulated device is stuck");
  waiting_[t_host] = {"an event that it asks for", event.stream, event.number, label_};
  const double until_s = now_s() + kAnswerS;
  while (stream(event.stream).done < event.number) {
    if (progress()) continue;
    if (now_s() > until_s) return false;
    mutex.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    mutex.lock();
  }
  waiting_.erase(t_host);
  return true;
}

bool Sim::query_stream(int id) {
  Event event;
  Lock lock(mutex);
  event.stream = id;
  event.number = stream(id).launched;
  event.clock = stream(id).clock;
  lock.unlock();
  return query(event);
}

void Sim::wait_event(const Event& event, const char* what) {
  if (event.stream >= 0) wait_for(event.stream, event.number, event.clock, what);
}

void Sim::wait_stream(int id, const char* what) {
  Lock lock(mutex);
  Stream& s = stream(id);
  const uint64_t number = s.launched;
  const Clock clock = s.clock;
  lock.unlock();
  wait_for(id, number, clock, what);
}

void Sim::wait_all() {
  for (size_t i = 0; i < streams_.size(); i++)
    wait_stream((int)i, "the device");
}

void Sim::host_waits(const std::string& what) {
  Lock lock(mutex);
  if (what.empty()) waiting_.erase(t_host);
  else waiting_[t_host] = {what, -1, 0, label_};
}

void Sim::held_up(const char* what) {
  note(std::string("host held up: ") + what);
  if (settings.sync_mode == 2)
    throw std::runtime_error("called a synchronizing CUDA operation");
}

// ---- What is said when nothing moves.

std::string Sim::state() {
  Lock lock(mutex);
  std::ostringstream text;
  text << "{\"hosts\": [";
  const char* comma = "";
  for (const auto& [_, waiting] : waiting_) {
    const auto& [what, id, number, label] = waiting;
    text << comma << "{\"what\": " << quoted(what) << ", \"stream\": " << id
         << ", \"number\": " << number << ", \"label\": " << quoted(names.text(label)) << "}";
    comma = ", ";
  }
  text << "], \"streams\": [";
  comma = "";
  for (const auto& s : streams_) {
    if (s->queue.empty()) continue;
    text << comma << "{\"id\": " << s->id << ", \"done\": " << s->done << ", \"operations\": [";
    comma = "";
    uint64_t number = s->done;
    for (const Operation& op : s->queue) {
      number++;
      text << comma << "{\"number\": " << number << ", \"name\": " << quoted(op.name)
           << ", \"label\": " << quoted(names.text(op.label))
           << ", \"site\": " << quoted(names.text(op.site))
           << ", \"message\": " << quoted(op.message) << ", \"members\": [";
      for (size_t i = 0; i < op.members.size(); i++) text << (i ? ", " : "") << op.members[i];
      text << "]"
           << ", \"started\": " << (op.started ? "true" : "false")
           << ", \"wait_stream\": " << op.wait_stream << ", \"wait_number\": " << op.wait_number << "}";
      comma = ", ";
    }
    text << "]}";
    comma = ", ";
  }
  text << "], \"queues\": [";
  comma = "";
  for (const auto& queue : queues_) {
    text << comma << "[";
    if (!queue.empty()) text << queue.front().first << ", " << queue.front().second;
    text << "]";
    comma = ", ";
  }
  text << "], \"n_running\": " << settings.n_running << "}";
  return text.str();
}

std::string Sim::stuck_file(int number) const {
  return stuck_files + std::to_string(number) + ".json";
}

// A process that nothing moves in says so, and takes it back; none is slow where all do.
bool Sim::is_stuck() {
  if (is_stuck_ || stuck_files.empty()) return is_stuck_;
  if (!has_told_) {
    const std::string part = stuck_file(process) + ".part";
    std::ofstream(part) << state();
    std::rename(part.c_str(), stuck_file(process).c_str());
    has_told_ = true;
  }
  for (int i = 0; i < settings.n_processes; i++)
    if (access(stuck_file(i).c_str(), F_OK) != 0) return false;
  return is_stuck_ = true;
}

void Sim::moves() {
  if (has_told_ && !is_stuck_) unlink(stuck_file(process).c_str());
  has_told_ = false;
}

}  // namespace sim
