// How the calls of the API begin, except those that only report a state.

#pragma once

#include "state.h"

namespace fake {

// 0, or why a call may not be made now: from a host function, or after a failure of the device.
int refused(const char* name);
// 0, or the status of a call that is forbidden while a stream is captured; invalidates that capture.
int refused_in_capture(const char* name);

}  // namespace fake

#define FAKE_CALL(name)                                                     \
  std::lock_guard<std::recursive_mutex> guard(fake::state().mutex);         \
  if (const int status = fake::refused(name)) return status

#define FAKE_UNSAFE_IN_CAPTURE(name) \
  if (const int status = fake::refused_in_capture(name)) return status
