// Queued operations: their order, races between unordered ones, and their execution.

#include <algorithm>

#include "state.h"

namespace fake {
namespace {

bool has_bit(const std::vector<uint64_t>& bits, uint64_t at) {
  return at / 64 < bits.size() && bits[at / 64] >> (at % 64) & 1;
}

void set_bit(std::vector<uint64_t>& bits, uint64_t at) {
  if (at / 64 >= bits.size()) bits.resize(at / 64 + 1);
  bits[at / 64] |= uint64_t{1} << (at % 64);
}

void add_bits(std::vector<uint64_t>& bits, const std::vector<uint64_t>& more) {
  if (more.size() > bits.size()) bits.resize(more.size());
  for (size_t i = 0; i < more.size(); i++) bits[i] |= more[i];
}

bool is_queued(uint64_t id) { return id >= state().base && id < state().base + state().queue.size(); }

Operation& operation(uint64_t id) { return state().queue[id - state().base]; }

std::vector<uint64_t> bits_of(const std::set<uint64_t>& ids) {
  std::vector<uint64_t> bits;
  for (uint64_t id : ids) {
    if (!is_queued(id)) continue;
    set_bit(bits, id - state().base);
    add_bits(bits, operation(id).ancestors);
  }
  return bits;
}

int run(Operation& op) {
  is_in_host_function = op.work->is_host;
  const int status = op.work->run();
  is_in_host_function = false;
  op.is_done = true;
  state().log.push_back(op.work->name);
  if (status != 0 && state().sticky == 0) {
    state().sticky = violation(kLaunchFailure, "%s failed as it ran on stream %d",
                               op.work->name.c_str(), op.work->stream);
    state().sticky_text = last_text;
  }
  return status;
}

bool can_run(const Operation& op) {
  return !op.is_done && (!op.work->can_run || op.work->can_run()) &&
         std::all_of(op.deps.begin(), op.deps.end(),
                     [](uint64_t id) { return !is_queued(id) || operation(id).is_done; });
}

// Runs a random operation of those that may run; `wanted` limits the choice. Returns its index in the
// queue; -1: none may run.
int64_t run_one(const std::vector<uint64_t>* wanted) {
  auto& queue = state().queue;
  std::vector<size_t> ready;
  for (size_t i = 0; i < queue.size(); i++)
    if ((!wanted || has_bit(*wanted, i)) && can_run(queue[i])) ready.push_back(i);
  if (ready.empty()) return -1;
  const size_t chosen = ready[state().random() % ready.size()];
  run(queue[chosen]);
  return chosen;
}

// Runs operations in random order until all of `wanted`, which includes their predecessors, have
// run. In half of the calls, chosen at random, others run too.
void drain(const std::vector<uint64_t>& wanted) {
  auto& queue = state().queue;
  const bool runs_others = state().random() % 2;
  size_t left = 0;
  for (size_t i = 0; i < queue.size(); i++) left += !queue[i].is_done && has_bit(wanted, i);
  while (left) {
    const int64_t chosen = run_one(runs_others ? nullptr : &wanted);
    if (chosen < 0) {
      state().sticky = violation(kLaunchFailure,
                                 "a stream waits for a flag that the host, which waits for the"
                                 " stream, cannot set any more");
      state().sticky_text = last_text;
      return;
    }
    left -= has_bit(wanted, chosen);
  }
}

void forget_known() {
  auto& queue = state().queue;
  if (!std::all_of(queue.begin(), queue.end(), [](const Operation& op) { return op.is_known; })) return;
  state().base += queue.size();
  queue.clear();
}

}  // namespace

std::string conflict(const Work& first, const Work& second) {
  for (const Use& a : first.uses)
    for (const Use& b : second.uses)
      if ((a.is_write || b.is_write) && a.start < b.start + b.bytes && b.start < a.start + a.bytes) {
        char text[400];
        snprintf(text, sizeof text,
                 "%s on stream %d and %s on stream %d use the same memory, and"
                 " no event orders them",
                 first.name.c_str(), first.stream, second.name.c_str(), second.stream);
        return text;
      }
  return "";
}

int enqueue(WorkPtr work, const std::set<uint64_t>& after, uint64_t* id) {
  auto& s = state();
  Operation op;
  op.work = std::move(work);
  op.deps.assign(after.begin(), after.end());
  op.ancestors = bits_of(after);
  for (size_t i = 0; s.checks_races && i < s.queue.size(); i++) {
    if (s.queue[i].is_known || has_bit(op.ancestors, i)) continue;
    const std::string text = conflict(*s.queue[i].work, *op.work);
    if (!text.empty()) return violation(kRace, "%s", text.c_str());
  }
  *id = s.base + s.queue.size();
  s.queue.push_back(std::move(op));
  return kSuccess;
}

int submit(Stream& stream, WorkPtr work) {
  auto& s = state();
  work->stream = stream.number;
  if (stream.capture) {
    auto& nodes = stream.capture->nodes;
    nodes.push_back({std::move(work), stream.captured});
    stream.captured = {int(nodes.size()) - 1};
    return kSuccess;
  }
  std::set<uint64_t> after = stream.frontier;
  Stream& legacy = s.legacy[stream.device];
  const bool is_legacy = &stream == &legacy;
  if (stream.is_blocking) after.insert(legacy.frontier.begin(), legacy.frontier.end());
  for (auto& [handle, other] : s.streams)
    if (is_legacy && other->is_blocking && other->device == stream.device)
      after.insert(other->frontier.begin(), other->frontier.end());
  uint64_t id;
  if (const int status = enqueue(std::move(work), after, &id)) return status;
  stream.frontier = {id};
  return kSuccess;
}

int complete(const std::set<uint64_t>& targets) {
  const auto wanted = bits_of(targets);
  drain(wanted);
  auto& queue = state().queue;
  for (size_t i = 0; i < queue.size(); i++) queue[i].is_known |= has_bit(wanted, i);
  forget_known();
  return state().sticky;
}

int complete_device(int device) {
  std::set<uint64_t> targets;
  auto& s = state();
  for (size_t i = 0; i < s.queue.size(); i++)
    if (s.queue[i].work->device == device) targets.insert(s.base + i);
  return complete(targets);
}

// Runs up to so many operations that may run.
void progress(uint64_t most) {
  while (most-- && run_one(nullptr) >= 0) {
  }
}

bool is_done(const std::set<uint64_t>& targets) {
  return std::all_of(targets.begin(), targets.end(),
                     [](uint64_t id) { return !is_queued(id) || operation(id).is_done; });
}

const Work* pending_user(const char* start, size_t bytes) {
  for (const Operation& op : state().queue)
    for (const Use& use : op.work->uses)
      if (!op.is_known && use.start < start + bytes && start < use.start + use.bytes)
        return op.work.get();
  return nullptr;
}

}  // namespace fake
