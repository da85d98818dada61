// Lets a CPU build of torch index tensors whose device is a CUDA device.

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using c10::impl::NoOpDeviceGuardImpl;
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
}  // namespace
