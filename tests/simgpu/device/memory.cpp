// Memory: a caching allocator by streams, pinned memory, and the checker for races.
#include "sim.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>

namespace sim {

namespace {

using Lock = std::unique_lock<std::recursive_mutex>;

constexpr size_t kAlignment = 512, kPage = 4096;
constexpr int kNoNumber = 0xFF;  // bytes of a NaN, in every floating-point type
constexpr size_t kMostReports = 200;

std::string text_of(const Names& names, const Access& access) {
  std::ostringstream text;
  text << (access.writes ? "write" : "read") << " by " << names.text(access.name);
  if (!access.look.empty()) text << " of " << access.look;
  text << " in [" << names.text(access.label) << "] at " << names.text(access.site);
  if (access.stream >= 0) text << " on stream " << access.stream;
  return text.str();
}

}  // namespace

// ---- The checker: two accesses that nothing orders, one of them a write.

bool Sim::is_ordered(const Access& access, const Clock& clock) const {
  return access.stream < (int)clock.size() && clock[access.stream] >= access.number;
}

void Sim::check(int id, uint64_t number, const Operation& operation) {
  const Clock& clock = stream(id).clock;
  for (const Touch& touch : operation.touches) {
    if (touch.low >= touch.high) continue;
    Block* block = block_of((void*)touch.low);
    if (block == nullptr) continue;
    const Access now{touch.low, touch.high, touch.writes, id, number,
                     names.number(operation.name), operation.label, operation.site, touch.look};
    std::vector<Access> kept;
    for (Access& before : block->log) {
      const bool overlaps = before.low < now.high && now.low < before.high;
      const bool ordered = before.stream == id || is_ordered(before, clock);
      if (overlaps && !ordered && (before.writes || now.writes)) report_race(before, now, *block);
      const bool is_covered = now.low <= before.low && before.high <= now.high && ordered &&
          (now.writes || (!before.writes && before.stream == id));
      if (!is_covered) kept.push_back(std::move(before));
    }
    kept.push_back(now);
    block->log = std::move(kept);
  }
}

void Sim::report_race(const Access& before, const Access& now, const Block& block) {
  counts["races"]++;
  std::ostringstream text;
  text << "race: " << text_of(names, before) << "  ||  " << text_of(names, now) << "  ("
       << (block.is_host ? "pinned " : "") << "block of " << block.asked << " bytes";
  if (!block.is_host) text << " of stream " << block.stream;
  text << ", allocated in [" << names.text(block.label) << "] at " << names.text(block.site) << ")";
  say(text.str());
}

void Sim::say(const std::string& text) {
  if (reports.size() < kMostReports && said_.insert(text).second) reports.push_back(text);
}

// ---- Pinned memory: pages that the host may not touch yet are protected, so that any
// access, by whatever code, is a fault; it is reported, and then allowed.

void Sim::protect(Block& block) {
  int protection = PROT_READ | PROT_WRITE;
  if (!block.is_exempt)
    for (const Access& access : block.log)
      if (!is_ordered(access, host_)) protection &= access.writes ? PROT_NONE : PROT_READ;
  if (protection != block.protection) mprotect((void*)block.ptr, block.size, protection);
  block.protection = protection;
  if (protection == (PROT_READ | PROT_WRITE)) protected_.erase(&block);
  else protected_.insert(&block);
}

void Sim::protect_touched(const Operation& operation, bool runs) {
  for (const Touch& touch : operation.touches) {
    if (touch.low >= touch.high) continue;
    Block* block = block_of((void*)touch.low);
    if (block == nullptr || !block->is_host) continue;
    if (!runs) {
      protect(*block);
    } else if (block->protection != (PROT_READ | PROT_WRITE)) {
      mprotect((void*)block->ptr, block->size, PROT_READ | PROT_WRITE);
      block->protection = PROT_READ | PROT_WRITE;
      protected_.insert(block);
    }
  }
}

bool Sim::host_fault(uintptr_t address, bool writes) {
  const std::string where = site();
  Lock lock(mutex);
  Block* block = block_of((void*)address);
  if (block == nullptr || !block->is_host || block->protection == (PROT_READ | PROT_WRITE))
    return false;
  const Access now{address, address + 1, writes, -1, 0, names.number("the host"),
                   label_, names.number(where), ""};
  for (const Access& before : block->log)
    if (!is_ordered(before, host_) && (before.writes || writes)) {
      report_race(before, now, *block);
      break;
    }
  block->is_exempt = true;
  protect(*block);
  return true;
}

static struct sigaction previous_action;

static void on_fault(int number, siginfo_t* info, void* context) {
#if defined(__x86_64__)
  const auto* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const bool writes = registers[REG_ERR] & 2;
#else
  const bool writes = true;
#endif
  if (Sim::get().host_fault((uintptr_t)info->si_addr, writes)) return;
  sigaction(number, &previous_action, nullptr);  // ours it is not: the next one ends us
}

void catch_faults() {
  struct sigaction action = {};
  action.sa_sigaction = &on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  struct sigaction now = {};
  sigaction(SIGSEGV, nullptr, &now);
  if (now.sa_sigaction == action.sa_sigaction) return;
  previous_action = now;
  sigaction(SIGSEGV, &action, nullptr);
}

// ---- The allocator.

Block* Sim::block_of(const void* ptr) {
  auto at = blocks_.upper_bound((uintptr_t)ptr);
  if (at == blocks_.begin()) return nullptr;
  Block* block = (--at)->second.get();
  return (uintptr_t)ptr < block->ptr + block->size ? block : nullptr;
}

void* Sim::allocate(size_t bytes, bool is_host) {
  if (bytes == 0) return nullptr;
  const std::string where = site();
  Lock lock(mutex);
  look_at_freed();
  const size_t unit = is_host ? kPage : kAlignment;
  const size_t size = (bytes + unit - 1) / unit * unit;
  const int id = is_host ? -1 : current();
  if (!is_host) poison_freed(stream(id));
  auto& free = free_[{is_host, id}];
  Block* block = nullptr;
  auto found = free.lower_bound(size);
  if (found != free.end() && found->first <= 2 * size) {
    auto latest = std::prev(free.upper_bound(found->first));
    block = latest->second;
    free.erase(latest);
  } else {
    auto made = std::make_unique<Block>();
    block = made.get();
    block->ptr = (uintptr_t)std::aligned_alloc(unit, size);
    block->size = size;
    block->is_host = is_host;
    block->stream = id;
    std::memset((void*)block->ptr, kNoNumber, size);
    blocks_[block->ptr] = std::move(made);
    if (is_host) catch_faults();
    else reserved += size;
  }
  if (is_host) {
    block->log.clear();
    block->is_exempt = false;
    protect(*block);
    std::memset((void*)block->ptr, kNoNumber, block->size);
  }
  block->asked = bytes;
  block->is_live = true;
  block->label = label_;
  block->site = names.number(where);
  if (!is_host) {
    allocated += block->size;
    peak = std::max(peak, allocated);
  }
  return (void*)block->ptr;
}

void Sim::record_stream(const void* ptr, int id) {
  Lock lock(mutex);
  Block* block = block_of(ptr);
  if (block != nullptr && (block->is_host || block->stream != id)) block->used_on.insert(id);
}

void Sim::free(void* ptr) {
  if (ptr == nullptr) return;
  Lock lock(mutex);
  Block* block = block_of(ptr);
  if (block == nullptr || !block->is_live || block->ptr != (uintptr_t)ptr) {
    say("freed in [" + names.text(label_) + "] what is not allocated" +
        (block == nullptr ? "" : ": a block of " + std::to_string(block->asked) +
                                     " bytes of [" + names.text(block->label) + "]"));
    return;
  }
  if (!block->is_host) allocated -= block->size;
  block->is_live = false;
  freed_.push_back(block);
  record_uses(*block);
  if (block->pending.empty()) {
    freed_.pop_back();
    give_back(block);
  }
}

// Notes what other streams have been given that may use a block.
void Sim::record_uses(Block& block) {
  for (int id : block.used_on) {
    Event event;
    record(event, id, /*by_allocator=*/true);
    block.pending.push_back(event);
  }
  block.used_on.clear();
}

void Sim::look_at_freed() {
  // What the allocator learns here orders this block's next use, and nothing else: a
  // program must not rely on when it looks.
  auto is_over = [&](const Event& event) {
    Stream& s = stream(event.stream);
    if (s.seen >= event.number) return true;
    if (ends_by_others(event.stream, event.number)) return false;
    if (settings.policy != Policy::eager && looks_() % 4 != 0) return false;
    return demand(event.stream, event.number);
  };
  auto is_free = [&](Block* block) {
    auto& events = block->pending;
    while (!events.empty() && is_over(events.back())) {
      const Clock& clock = events.back().clock;
      std::erase_if(block->log, [&](const Access& access) { return is_ordered(access, clock); });
      events.pop_back();
    }
    if (!events.empty()) return false;
    give_back(block);
    return true;
  };
  std::erase_if(freed_, is_free);
}

void Sim::give_back(Block* block) {
  if (!block->is_host) {
    Operation poison;
    poison.name = "free";
    poison.by_allocator = true;
    poison.touches = {{block->ptr, block->ptr + block->size, true}};
    poison.run = [at = (void*)block->ptr, size = block->size] {
      std::memset(at, kNoNumber, size);
      return true;
    };
    stream(block->stream).poisons.push_back(std::move(poison));
  }
  free_[{block->is_host, block->stream}].insert({block->size, block});
}

std::vector<std::string> Sim::live() {
  Lock lock(mutex);
  std::vector<std::string> texts;
  for (const auto& [_, block] : blocks_)
    if (block->is_live)
      texts.push_back(std::to_string(block->asked) + " bytes" + (block->is_host ? " (pinned)" : "") +
                      " of [" + names.text(block->label) + "] at " + names.text(block->site));
  return texts;
}

}  // namespace sim
