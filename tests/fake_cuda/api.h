// The checks of API calls. A few calls that only report a state have none.

#pragma once

#include "state.h"

namespace fake {

// 0, or the status of a refused call: one from a host function, or after a failure of the device.
int refused(const char* name);
// 0, or the status of a call that a running capture forbids: in mode 0 on every thread, in mode 1
// on the thread that began it, in mode 2 on none. Invalidates the captures that forbid it.
int refused_in_capture(const char* name);
// The stream of a handle; notes a violation and returns nullptr if there is none.
Stream* stream_of(const char* name, void* handle);
// 0, or the status of a call that a captured stream does not take. Invalidates its capture.
int refused_if_captured(const char* name, Stream& stream);
// 0, or the status of work that a stream refuses, because its capture is invalid, or because it is
// the legacy stream of a device of which this thread captures other streams. Invalidates those
// captures.
int may_submit(const char* name, Stream& stream);
// Makes a capture invalid; the first reason counts.
void break_capture(Capture& capture, const std::string& why);

}  // namespace fake

#define FAKE_CALL(name)                                             \
  std::lock_guard<std::recursive_mutex> guard(fake::state().mutex); \
  if (const int status = fake::refused(name)) return status

#define FAKE_UNSAFE_IN_CAPTURE(name) \
  if (const int status = fake::refused_in_capture(name)) return status
