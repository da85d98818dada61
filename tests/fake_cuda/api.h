// The checks at the beginning of API calls. A few calls that only report a state have none.

#pragma once

#include "state.h"

namespace fake {

// 0, or the status of a refused call: one from a host function, or after a failure of the device.
int refused(const char* name);
// 0, or the status of a call that a running capture forbids: in mode 0 on every thread, in mode 1
// on its own, in mode 2 on none. Invalidates the first such capture.
int refused_in_capture(const char* name);

}  // namespace fake

#define FAKE_CALL(name)                                                     \
  std::lock_guard<std::recursive_mutex> guard(fake::state().mutex);         \
  if (const int status = fake::refused(name)) return status

#define FAKE_UNSAFE_IN_CAPTURE(name) \
  if (const int status = fake::refused_in_capture(name)) return status
