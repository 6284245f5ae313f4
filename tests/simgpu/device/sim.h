// A simulated accelerator: streams, events, memory, and a checker for races.
//
// An operation is a closure in the queue of a stream. The host launches it and goes on;
// it runs when a policy lets it, or when somebody must wait for it. The checker does not
// need unlucky timing: it knows by vector clocks what the program has ordered.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace sim {

using Clock = std::vector<uint64_t>;  // by stream: the last operation that is ordered before

// Texts under numbers: what, where and for whom something was launched.
class Names {
 public:
  int number(const std::string& text);
  const std::string& text(int number) const { return texts_[number]; }

 private:
  std::deque<std::string> texts_{""};
  std::unordered_map<std::string, int> numbers_{{"", 0}};
};

struct Touch {  // bytes that an operation reads or writes
  uintptr_t low, high;
  bool writes;
  std::string look{};  // dtype and sizes, for reports
};

struct Operation {
  std::string name;
  std::function<bool()> run;  // false: it cannot end yet, a message has not come
  std::vector<Touch> touches;
  int wait_stream = -1;  // waits for that stream's operation number wait_number
  uint64_t wait_number = 0;
  std::string message;  // what it exchanges with other processes; all ends say the same
  std::vector<int> members;  // processes that it is exchanged with
  bool needs_others = false;
  bool only_orders = false;  // an event, or a wait for one
  bool by_allocator = false;  // whenever a thread of the host lets memory go
  bool started = false;
  int label = 0, site = 0;
  double launched_s = 0;
};

struct Access {
  uintptr_t low, high;
  bool writes;
  int stream;
  uint64_t number;
  int name, label, site;
  std::string look;
};

struct Stream {
  int id = 0;
  std::deque<Operation> queue;
  uint64_t launched = 0, done = 0;
  uint64_t seen = 0;         // the host has waited for it
  uint64_t others_from = 0;  // from here on it ends when other processes let it; 0: none
  Clock clock;
  double time_s = 0;
  std::vector<Operation> poisons;  // of freed blocks
};

struct Event {
  static constexpr int never = -1;
  int stream = never;
  uint64_t number = 0;
  Clock clock;
  std::shared_ptr<double> time_s;
};

struct Block {
  uintptr_t ptr = 0;
  size_t size = 0, asked = 0;
  int stream = 0;
  bool is_host = false, is_live = false;
  bool is_exempt = false;  // a host's access was reported: not again until it is free
  int protection = 3;      // of pages of the host's memory: 0 none, 1 reads, 3 all
  int label = 0, site = 0;
  std::set<int> used_on;
  std::vector<Event> pending;
  std::vector<Access> log;
};

enum class Policy { lazy, random, eager };

struct Settings {
  Policy policy = Policy::lazy;
  int queues = 0;       // hardware queues that streams share; 0: one for each stream
  int n_streams = 32;   // that there are to hand out, in turns
  int n_running = 0;    // operations that may run at the same time; 0: any number
  int sync_mode = 0;  // 2: calls that hold up the host are errors
  double patience_s = 30;
  double delay_s = 0;  // messages and collectives take so long at most, drawn at random
  int fails_at = 0;    // counts down with messages and collectives: the last one fails
  int n_processes = 1;  // that have such devices
};

class Sim {
 public:
  static Sim& get();

  // Streams and events.
  int current();
  int exchange(int stream);
  int new_stream();
  void launch(int stream, Operation operation);
  void record(Event& event, int stream, bool by_allocator = false);
  void block(const Event& event, int stream);
  bool query(const Event& event);
  bool query_stream(int stream);
  void wait_event(const Event& event, const char* what);
  void wait_stream(int stream, const char* what);
  void wait_all();
  void host_waits(const std::string& what);  // for a process; "": no longer
  bool progress();  // runs one operation that can run, if any
  bool pump();      // likewise, if nothing has been launched for a while
  std::string state();  // of hosts and streams, as JSON

  // Memory.
  void* allocate(size_t bytes, bool is_host);
  void free(void* ptr);
  void record_stream(const void* ptr, int stream);
  Block* block_of(const void* ptr);
  bool host_fault(uintptr_t address, bool writes);
  std::vector<std::string> live();

  void held_up(const char* what);  // a call that holds up the host
  void note(const std::string& what) { counts[what]++; }
  void set_label(const std::string& text) { label_ = names.number(text); }
  void begin(uint64_t seed);  // all is done and forgotten; one seed gives one run
  double draw_delay_s();

  Settings settings;
  Names names;
  std::function<std::string()> call_site;  // of the caller in Python, if known
  std::map<std::string, int64_t> counts;
  std::map<std::tuple<std::string, int, int>, int64_t> waits;  // what, label, site
  std::vector<std::string> reports;
  uint64_t digest = 0;  // of all that the host has done, and has been told
  std::string stuck_files;  // where processes write their states when nothing moves
  int process = 0;          // this one's number
  int64_t allocated = 0, peak = 0, reserved = 0;
  std::recursive_mutex mutex;

 private:
  Stream& stream(int id);
  std::string site();
  uint64_t enqueue(int stream, Operation operation);
  void mix(const std::string& text, uint64_t number);
  void check(int id, uint64_t number, const Operation& operation);
  void report_race(const Access& before, const Access& now, const Block& block);
  void say(const std::string& text);
  bool is_ordered(const Access& access, const Clock& clock) const;
  bool can_start(Stream& stream);
  bool run_head(Stream& stream);
  bool demand(int id, uint64_t number);
  void wait_for(int id, uint64_t number, const Clock& clock, const char* what);
  void poison_freed(Stream& stream);
  void after_launch();
  void host_learns(const Clock& clock);
  bool ends_by_others(int id, uint64_t number);
  bool comes_from_others(const Event& event);
  bool is_stuck();
  std::string stuck_file(int number) const;
  void moves();
  void record_uses(Block& block);
  void give_back(Block* block);
  void look_at_freed();
  void protect(Block& block);
  void protect_touched(const Operation& operation, bool runs);

  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<std::deque<std::pair<int, uint64_t>>> queues_;
  Clock host_;
  std::map<uintptr_t, std::unique_ptr<Block>> blocks_;
  std::set<Block*> protected_;
  std::map<std::pair<bool, int>, std::multimap<size_t, Block*>> free_;
  std::vector<Block*> freed_;  // that another stream may still use
  std::set<std::string> said_;
  std::map<int, std::tuple<std::string, int, uint64_t, int>> waiting_;  // by host's thread
  std::mt19937_64 draws_, order_;   // what the host is told; what runs when
  std::mt19937_64 looks_, delays_;  // when the allocator looks; when messages come
  int n_running_ = 0, next_stream_ = 0, label_ = 0;
  uint64_t n_launched_ = 0;
  double last_launch_s_ = 0, last_progress_s_ = 0;
  bool has_told_ = false, is_stuck_ = false;  // this process; all of them
};

double now_s();
void catch_faults();

}  // namespace sim
