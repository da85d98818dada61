// Devices, streams and events, and the work that streams take: kernels, copies, host functions.

#include <algorithm>
#include <cstring>

#include "api.h"

namespace fake {

void break_capture(Capture& capture, const std::string& why) {
  if (capture.broken_by.empty()) capture.broken_by = why;
}

int refused(const char* name) {
  if (is_in_host_function) return violation(kNotPermitted, "%s: called from a host function", name);
  if (state().sticky) {
    last_text = state().sticky_text;
    return last_status = state().sticky;
  }
  return kSuccess;
}

int refused_in_capture(const char* name) {
  int status = kSuccess;
  for (auto& capture : state().captures) {
    const bool is_mine = capture->thread == std::this_thread::get_id();
    if (capture->mode == 2 || (capture->mode == 1 && !is_mine)) continue;
    status = violation(kCaptureUnsupported, "%s: not allowed while stream %d is captured", name,
                       capture->origin->number);
    break_capture(*capture, last_text);
  }
  return status;
}

Stream* stream_of(const char* name, void* handle) {
  auto& s = state();
  if (!handle || handle == (void*)1) return &s.legacy[current_device];
  auto found = s.streams.find(handle);
  if (found == s.streams.end() || !found->second->is_alive) {
    violation(kInvalidHandle, "%s: a stream that %s", name,
              found == s.streams.end() ? "was never made" : "was destroyed");
    return nullptr;
  }
  return found->second.get();
}

static Event* event_of(const char* name, void* handle) {
  auto found = state().events.find(handle);
  if (found == state().events.end() || !found->second->is_alive) {
    violation(kInvalidHandle, "%s: an event that %s", name,
              found == state().events.end() ? "was never made" : "was destroyed");
    return nullptr;
  }
  return found->second.get();
}

int may_submit(const char* name, Stream& stream) {
  if (stream.capture && !stream.capture->broken_by.empty()) {
    last_text = "the capture is invalid: " + stream.capture->broken_by;
    return last_status = kCaptureInvalidated;
  }
  if (&stream != &state().legacy[stream.device]) return kSuccess;
  int status = kSuccess;
  for (auto& capture : state().captures) {
    if (capture->thread != std::this_thread::get_id() || capture->origin->device != stream.device)
      continue;
    status = violation(kCaptureImplicit,
                       "%s: the default stream is used while stream %d is captured;"
                       " its work does not enter the graph",
                       name, capture->origin->number);
    break_capture(*capture, last_text);
  }
  return status;
}

int refused_if_captured(const char* name, Stream& stream) {
  if (!stream.capture) return kSuccess;
  violation(kCaptureUnsupported, "%s: stream %d is captured", name, stream.number);
  break_capture(*stream.capture, last_text);
  return kCaptureUnsupported;
}

}  // namespace fake

using namespace fake;

extern "C" {

int cudaSetDevice(int device) {
  FAKE_CALL("cudaSetDevice");
  if (device < 0 || device >= state().num_devices)
    return violation(kInvalidDevice, "cudaSetDevice: no device %d", device);
  current_device = device;
  return kSuccess;
}

int cudaStreamCreateWithFlags(void** handle, unsigned flags) {
  FAKE_CALL("cudaStreamCreateWithFlags");
  auto stream = std::make_unique<Stream>();
  stream->number = int(state().streams.size()) + 1;
  stream->device = current_device;
  stream->is_blocking = !(flags & 1);
  *handle = stream.get();
  state().streams[*handle] = std::move(stream);
  return kSuccess;
}

int cudaStreamDestroy(void* handle) {
  FAKE_CALL("cudaStreamDestroy");
  Stream* stream = stream_of("cudaStreamDestroy", handle);
  if (!stream) return last_status;
  if (const int status = refused_if_captured("cudaStreamDestroy", *stream)) return status;
  stream->is_alive = false;
  return kSuccess;
}

int cudaStreamSynchronize(void* handle) {
  FAKE_CALL("cudaStreamSynchronize");
  Stream* stream = stream_of("cudaStreamSynchronize", handle);
  if (!stream) return last_status;
  if (const int status = refused_if_captured("cudaStreamSynchronize", *stream)) return status;
  if (const int status = may_submit("cudaStreamSynchronize", *stream)) return status;
  return complete(stream->frontier);
}

int cudaDeviceSynchronize() {
  FAKE_CALL("cudaDeviceSynchronize");
  int status = kSuccess;
  for (auto& capture : state().captures)
    if (capture->origin->device == current_device)
      status = refused_if_captured("cudaDeviceSynchronize", *capture->origin);
  return status ? status : complete_device(current_device);
}

int cudaEventCreateWithFlags(void** handle, unsigned) {
  FAKE_CALL("cudaEventCreateWithFlags");
  auto event = std::make_unique<Event>();
  event->device = current_device;
  *handle = event.get();
  state().events[*handle] = std::move(event);
  return kSuccess;
}

int cudaEventDestroy(void* handle) {
  FAKE_CALL("cudaEventDestroy");
  Event* event = event_of("cudaEventDestroy", handle);
  if (!event) return last_status;
  event->is_alive = false;
  return kSuccess;
}

int cudaEventRecord(void* handle, void* stream_handle) {
  FAKE_CALL("cudaEventRecord");
  Event* event = event_of("cudaEventRecord", handle);
  Stream* stream = event ? stream_of("cudaEventRecord", stream_handle) : nullptr;
  if (!stream) return last_status;
  if (event->device != stream->device)
    return violation(kInvalidHandle,
                     "cudaEventRecord: an event of device %d on a stream of device"
                     " %d",
                     event->device, stream->device);
  if (const int status = may_submit("cudaEventRecord", *stream)) return status;
  event->is_recorded = true;
  event->frontier = stream->frontier;
  event->capture = stream->capture;
  event->captured = stream->captured;
  return kSuccess;
}

int cudaEventQuery(void* handle) {
  FAKE_CALL("cudaEventQuery");
  Event* event = event_of("cudaEventQuery", handle);
  if (!event) return last_status;
  if (event->capture)
    return violation(kCapturedEvent, "cudaEventQuery: the event was recorded in a capture");
  return is_done(event->frontier) ? complete(event->frontier) : int(kNotReady);
}

int cudaEventSynchronize(void* handle) {
  FAKE_CALL("cudaEventSynchronize");
  Event* event = event_of("cudaEventSynchronize", handle);
  if (!event) return last_status;
  if (!event->is_recorded)
    return violation(kInvalidValue, "cudaEventSynchronize: an event that was never recorded");
  if (event->capture) {
    violation(kCapturedEvent, "cudaEventSynchronize: the event was recorded in a capture");
    break_capture(*event->capture, last_text);
    return kCapturedEvent;
  }
  return complete(event->frontier);
}

int cudaStreamWaitEvent(void* stream_handle, void* handle, unsigned) {
  FAKE_CALL("cudaStreamWaitEvent");
  Event* event = event_of("cudaStreamWaitEvent", handle);
  Stream* stream = event ? stream_of("cudaStreamWaitEvent", stream_handle) : nullptr;
  if (!stream) return last_status;
  if (!event->is_recorded)
    return violation(kInvalidValue,
                     "cudaStreamWaitEvent: stream %d waits for an event that was"
                     " never recorded",
                     stream->number);
  if (const int status = may_submit("cudaStreamWaitEvent", *stream)) return status;
  if (!event->capture) {
    if (stream->capture) {
      violation(kCaptureIsolation,
                "cudaStreamWaitEvent: stream %d, which is captured, waits for"
                " an event from outside of the capture",
                stream->number);
      break_capture(*stream->capture, last_text);
      return kCaptureIsolation;
    }
    stream->frontier.insert(event->frontier.begin(), event->frontier.end());
    return kSuccess;
  }
  if (!event->capture->is_active)
    return violation(kCapturedEvent,
                     "cudaStreamWaitEvent: stream %d waits for an event of a capture"
                     " that has ended",
                     stream->number);
  if (stream->capture && stream->capture != event->capture) {
    violation(kCaptureMerge, "cudaStreamWaitEvent: stream %d waits for an event of another capture",
              stream->number);
    break_capture(*stream->capture, last_text);
    break_capture(*event->capture, last_text);
    return kCaptureMerge;
  }
  stream->capture = event->capture;
  stream->captured.insert(event->captured.begin(), event->captured.end());
  return kSuccess;
}

int cudaLaunchHostFunc(void* stream_handle, void (*function)(void*), void* argument) {
  FAKE_CALL("cudaLaunchHostFunc");
  Stream* stream = stream_of("cudaLaunchHostFunc", stream_handle);
  if (!stream) return last_status;
  if (!function) return violation(kInvalidValue, "cudaLaunchHostFunc: no function");
  if (const int status = may_submit("cudaLaunchHostFunc", *stream)) return status;
  auto work = std::make_shared<Work>();
  work->name = "host function";
  work->device = stream->device;
  work->is_host = true;
  auto declared = state().declared.find(argument);
  if (declared == state().declared.end())
    state().num_undeclared++;
  else
    work->uses = declared->second;
  for (Use& use : work->uses)
    if (const int status = resolve(use, "host function", -1, true)) return status;
  work->run = [function, argument] {
    function(argument);
    return 0;
  };
  return submit(*stream, std::move(work));
}

int cudaMemcpyAsync(void* target, const void* source, size_t bytes, int, void* stream_handle) {
  FAKE_CALL("cudaMemcpyAsync");
  Stream* stream = stream_of("cudaMemcpyAsync", stream_handle);
  if (!stream) return last_status;
  if (const int status = may_submit("cudaMemcpyAsync", *stream)) return status;
  if (!bytes) return kSuccess;
  auto work = std::make_shared<Work>();
  work->name = "copy";
  work->device = stream->device;
  work->uses = {{(char*)source, bytes, false}, {(char*)target, bytes, true}};
  bool is_pageable = false;
  for (Use& use : work->uses) {
    if (const int status = resolve(use, "copy", -1, true)) return status;
    is_pageable |= !use.region;
  }
  if (is_pageable && stream->capture) {
    violation(kCaptureUnsupported,
              "cudaMemcpyAsync: %zu bytes of memory that is not pinned, while"
              " stream %d is captured",
              bytes, stream->number);
    break_capture(*stream->capture, last_text);
    return kCaptureUnsupported;
  }
  work->run = [=] {
    memmove(target, source, bytes);
    return 0;
  };
  const int status = submit(*stream, std::move(work));
  return status || !is_pageable ? status : complete(stream->frontier);  // CUDA may wait, too
}

// Submits a kernel: `function(argument)`, which accesses these ranges of memory and returns 0 if it
// succeeds. `forget(argument)` is called once no queue, capture or graph holds the kernel any more;
// at once if it is refused.
int fakeLaunchKernel(const char* name, void* stream_handle, int (*function)(int64_t), int64_t argument,
                     void (*forget)(int64_t), int count, char** starts, const int64_t* bytes,
                     const int* is_write) {
  std::shared_ptr<void> owner((void*)1, [=](void*) { forget(argument); });
  FAKE_CALL(name);
  Stream* stream = stream_of(name, stream_handle);
  if (!stream) return last_status;
  if (stream->device != current_device)
    return violation(kInvalidHandle,
                     "%s: launched on a stream of device %d, the current device is"
                     " %d",
                     name, stream->device, current_device);
  if (const int status = may_submit(name, *stream)) return status;
  auto work = std::make_shared<Work>();
  work->name = name;
  work->device = stream->device;
  for (int i = 0; i < count; i++) {
    Use use{starts[i], size_t(bytes[i]), is_write[i] != 0};
    if (const int status = resolve(use, name, stream->device, false)) return status;
    if (use.bytes) work->uses.push_back(use);
  }
  work->run = [=, owner = std::move(owner)] { return function(argument); };
  return submit(*stream, std::move(work));
}

}  // extern "C"
