// Stream memory operations: a stream writes a value, or waits until the host has written one; and
// the functions that the host runs in between.
//
// Such a function is an operation of the queue, like one that the driver calls, so races are found
// from the memory that it declares. It follows the write of its flag `ready` and the function before
// it, and a wait for its flag `done` follows it. It has run once the host has set `done`.

#include "api.h"

namespace fake {
namespace {

uint32_t value_at(uint64_t address) {
  return __atomic_load_n((const uint32_t*)address, __ATOMIC_ACQUIRE);
}

std::shared_ptr<Work> flag_work(const char* name, Stream& stream, uint64_t address, bool is_write) {
  auto work = std::make_shared<Work>();
  work->name = name;
  work->device = stream.device;
  work->uses = {{(char*)address, sizeof(uint32_t), is_write}};
  return work;
}

// 0, or the status of a call that the stream refuses, or whose flag is not in pinned memory.
int refused_flag(const char* name, Stream& stream, Work& work) {
  if (const int status = may_submit(name, stream)) return status;
  const char* start = work.uses[0].start;
  const int status = resolve(work.uses[0], name, stream.device, true);
  if (status || work.uses[0].region) return status;
  return violation(kInvalidValue, "%s: the flag at %p is not in pinned memory", name, (void*)start);
}

// The function that the host runs once a flag is set; null: none was declared for it.
std::shared_ptr<Work> served_work(const Handover& handover, const Stream& stream) {
  auto declared = state().declared.find(handover.argument);
  if (declared == state().declared.end()) {
    state().num_undeclared++;
    return nullptr;
  }
  auto work = std::make_shared<Work>();
  work->name = "host function";
  work->device = stream.device;
  work->stream = kServed;
  work->uses = declared->second;
  for (Use& use : work->uses)
    if (resolve(use, "host function", -1, true)) return nullptr;
  const uint64_t done = handover.done;
  work->can_run = [done] { return value_at(done) != 0; };
  work->run = [] { return 0; };
  return work;
}

// Adds the function to the capture, or to the queue, behind the stream's last work, the write.
int add_served(Stream& stream, const Handover& handover) {
  auto work = served_work(handover, stream);
  if (!work) return kInvalidValue;
  if (stream.capture) {
    Capture& capture = *stream.capture;
    std::set<int> after = stream.captured;
    if (capture.last_served >= 0) after.insert(capture.last_served);
    capture.nodes.push_back({std::move(work), after});
    capture.last_served = int(capture.nodes.size()) - 1;
    capture.served[handover.done] = capture.last_served;
    return kSuccess;
  }
  std::set<uint64_t> after = stream.frontier;
  if (stream.last_served) after.insert(stream.last_served);
  if (const int status = enqueue(std::move(work), after, &stream.last_served)) return status;
  state().served[handover.done] = stream.last_served;
  return kSuccess;
}

}  // namespace
}  // namespace fake

using namespace fake;

extern "C" {

int cuStreamWriteValue32_v2(void* handle, uint64_t address, uint32_t value, unsigned) {
  FAKE_CALL("cuStreamWriteValue32");
  Stream* stream = stream_of("cuStreamWriteValue32", handle);
  if (!stream) return last_status;
  auto work = flag_work("write flag", *stream, address, true);
  if (const int status = refused_flag("cuStreamWriteValue32", *stream, *work)) return status;
  work->run = [address, value] {
    if (value_at(address) == value)
      return violation(kInvalidValue, "a stale flag: the value that is written is there already");
    __atomic_store_n((uint32_t*)address, value, __ATOMIC_RELEASE);
    return 0;
  };
  if (const int status = submit(*stream, std::move(work))) return status;
  auto found = state().handovers.find(address);
  return found == state().handovers.end() ? int(kSuccess) : add_served(*stream, found->second);
}

int cuStreamWaitValue32_v2(void* handle, uint64_t address, uint32_t value, unsigned) {
  FAKE_CALL("cuStreamWaitValue32");
  Stream* stream = stream_of("cuStreamWaitValue32", handle);
  if (!stream) return last_status;
  auto work = flag_work("wait for flag", *stream, address, false);
  if (const int status = refused_flag("cuStreamWaitValue32", *stream, *work)) return status;
  work->can_run = [address, value] { return int32_t(value_at(address) - value) >= 0; };
  work->run = [] { return 0; };
  if (stream->capture) {
    auto found = stream->capture->served.find(address);
    if (found != stream->capture->served.end()) stream->captured.insert(found->second);
  } else {
    auto found = state().served.find(address);
    if (found != state().served.end()) stream->frontier.insert(found->second);
  }
  return submit(*stream, std::move(work));
}

// Lets some of the queued work run first, as a device runs while the host looks again.
int cuStreamQuery(void* handle) {
  FAKE_CALL("cuStreamQuery");
  Stream* stream = stream_of("cuStreamQuery", handle);
  if (!stream) return last_status;
  if (const int status = refused_if_captured("cuStreamQuery", *stream)) return status;
  progress(state().random() % 4);
  if (state().sticky) return state().sticky;
  return is_done(stream->frontier) ? complete(stream->frontier) : int(kNotReady);
}

// Declares that the host runs the function with this argument once the flag `ready` is set, and then
// sets `done`.
void fakeHandover(uint64_t ready, uint64_t done, void* argument) {
  std::lock_guard<std::recursive_mutex> guard(state().mutex);
  state().handovers[ready] = {done, argument};
}

}  // extern "C"
