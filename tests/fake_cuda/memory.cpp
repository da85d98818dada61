// Allocated, pinned and freed memory; the calls that allocate, free, pin and unpin.

#include <sys/mman.h>

#include <cstdarg>
#include <cstring>

#include "api.h"

namespace fake {

State& state() {
  static State& found = *new State;  // not destroyed at exit, when Python has ended
  return found;
}

thread_local int current_device = 0;
thread_local bool is_in_host_function = false;
thread_local std::string last_text;
thread_local int last_status = 0;

int violation(int status, const char* format, ...) {
  char text[600];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  last_text = text;
  last_status = status;
  state().violations.push_back(text);
  return status;
}

Region* region_at(char* start, size_t bytes) {
  auto& regions = state().regions;
  auto found = regions.upper_bound(start);
  if (found == regions.begin()) return nullptr;
  --found;
  return start + bytes <= found->first + found->second.bytes ? &found->second : nullptr;
}

static Block* block_at(char* start, size_t bytes, char** first) {
  auto& blocks = state().blocks;
  auto found = blocks.upper_bound(start);
  if (found == blocks.begin()) return nullptr;
  --found;
  *first = found->first;
  return start + bytes <= found->first + found->second.bytes ? &found->second : nullptr;
}

static bool has_blocks(char* start) {
  auto& regions = state().regions;
  auto region = --regions.upper_bound(start);
  auto block = state().blocks.lower_bound(region->first);
  return block != state().blocks.end() && block->first < region->first + region->second.bytes;
}

std::string about(char* address) {
  if (region_at(address, 1)) return "memory beyond an allocation's end";
  for (auto& [start, bytes] : state().freed)
    if (start <= address && address < start + bytes) return "memory that was freed";
  return "memory of the host that is not pinned";
}

int resolve(Use& use, const char* name, int device, bool may_be_pageable) {
  if (!use.bytes) return kSuccess;
  Region* region = region_at(use.start, use.bytes);
  if (!region) {
    const std::string what = about(use.start);
    if (may_be_pageable && what == "memory of the host that is not pinned") return kSuccess;
    return violation(kIllegalAddress, "%s: %zu bytes at %p are %s", name, use.bytes, (void*)use.start,
                     what.c_str());
  }
  if (region->place == Place::kDevice && device >= 0 && region->device != device)
    return violation(kIllegalAddress, "%s: %p is memory of device %d, the stream is of device %d", name,
                     (void*)use.start, region->device, device);
  use.region = region->id;
  if (!has_blocks(use.start)) return kSuccess;
  char* first = nullptr;
  Block* block = block_at(use.start, use.bytes, &first);
  if (!block || !block->is_live)
    return violation(kIllegalAddress, "%s: %zu bytes at %p are memory that was freed", name, use.bytes,
                     (void*)use.start);
  use.block = block->id;
  use.is_pooled = block->is_pooled;
  return kSuccess;
}

// Whether memory overlaps a living block other than its own.
static bool is_given_away(const Use& use) {
  auto& blocks = state().blocks;
  auto next = blocks.upper_bound(use.start);
  if (next != blocks.begin()) --next;
  for (; next != blocks.end() && next->first < use.start + use.bytes; ++next) {
    const Block& block = next->second;
    if (next->first + block.bytes > use.start && block.is_live && block.id != use.block) return true;
  }
  return false;
}

int check_alive(const Work& work) {
  for (const Use& use : work.uses) {
    if (!use.region) continue;
    Region* region = region_at(use.start, use.bytes);
    if (!region || region->id != use.region)
      return violation(kIllegalAddress, "a graph is launched after memory of its %s was %s",
                       work.name.c_str(), region ? "freed and given away again" : "freed or unpinned");
    if (use.is_pooled && is_given_away(use))
      return violation(kIllegalAddress, "a graph is launched while other tensors have memory of its %s",
                       work.name.c_str());
    if (use.is_pooled) continue;
    char* first = nullptr;
    Block* block = use.block ? block_at(use.start, use.bytes, &first) : nullptr;
    if (use.block && (!block || !block->is_live || block->id != use.block))
      return violation(kIllegalAddress, "a graph is launched after memory of its %s was %s",
                       work.name.c_str(),
                       block && block->is_live ? "freed and given away again" : "freed");
  }
  return kSuccess;
}

static int allocate(void** found, size_t bytes, Place place) {
  auto& s = state();
  if (!bytes) return violation(kInvalidValue, "an allocation of 0 bytes");
  if (place == Place::kDevice && s.used_bytes[current_device] + bytes > s.total_bytes) {
    last_text = "out of memory";
    return last_status = kOutOfMemory;
  }
  void* memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return last_status = kOutOfMemory;
  if (!s.is_hollow) memset(memory, 0xff, bytes);  // NaN where it is read before it is written
  s.regions[(char*)memory] = {place, bytes, current_device, s.next_id++};
  if (place == Place::kDevice) s.used_bytes[current_device] += bytes;
  *found = memory;
  return kSuccess;
}

static int release(const char* name, void* pointer, Place place) {
  auto& s = state();
  auto found = s.regions.find((char*)pointer);
  if (found == s.regions.end() || found->second.place != place)
    return violation(
        kInvalidValue, "%s: %p is %s", name, pointer,
        s.freed.count((char*)pointer) ? "freed already" : "not the start of an allocation of its kind");
  const Region region = found->second;
  if (const int status = complete_device(region.device)) return status;  // CUDA waits, too
  s.regions.erase((char*)pointer);
  auto block = s.blocks.lower_bound((char*)pointer);
  while (block != s.blocks.end() && block->first < (char*)pointer + region.bytes)
    block = s.blocks.erase(block);
  if (place == Place::kDevice) s.used_bytes[region.device] -= region.bytes;
  s.freed[(char*)pointer] = region.bytes;
  // Keeps the addresses reserved: memory that malloc got there would count as freed.
  mmap(pointer, region.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
       0);
  return kSuccess;
}

}  // namespace fake

using namespace fake;

extern "C" {

int cudaMalloc(void** pointer, size_t bytes) {
  FAKE_CALL("cudaMalloc");
  FAKE_UNSAFE_IN_CAPTURE("cudaMalloc");
  return allocate(pointer, bytes, Place::kDevice);
}

int cudaFree(void* pointer) {
  FAKE_CALL("cudaFree");
  FAKE_UNSAFE_IN_CAPTURE("cudaFree");
  return pointer ? release("cudaFree", pointer, Place::kDevice) : kSuccess;
}

int cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  FAKE_CALL("cudaHostAlloc");
  FAKE_UNSAFE_IN_CAPTURE("cudaHostAlloc");
  return allocate(pointer, bytes, Place::kHostAlloc);
}

int cudaFreeHost(void* pointer) {
  FAKE_CALL("cudaFreeHost");
  FAKE_UNSAFE_IN_CAPTURE("cudaFreeHost");
  return pointer ? release("cudaFreeHost", pointer, Place::kHostAlloc) : kSuccess;
}

int cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  FAKE_CALL("cudaHostRegister");
  FAKE_UNSAFE_IN_CAPTURE("cudaHostRegister");
  if (!pointer || !bytes) return violation(kInvalidValue, "cudaHostRegister of nothing");
  auto& regions = state().regions;
  auto next = regions.upper_bound((char*)pointer);
  const bool meets_next = next != regions.end() && next->first < (char*)pointer + bytes;
  if (meets_next || region_at((char*)pointer, 1))
    return violation(kAlreadyRegistered, "cudaHostRegister: %zu bytes at %p are pinned in part", bytes,
                     pointer);
  regions[(char*)pointer] = {Place::kRegistered, bytes, current_device, state().next_id++};
  state().freed.erase((char*)pointer);
  return kSuccess;
}

int cudaHostUnregister(void* pointer) {
  FAKE_CALL("cudaHostUnregister");
  FAKE_UNSAFE_IN_CAPTURE("cudaHostUnregister");
  auto& regions = state().regions;
  auto found = regions.find((char*)pointer);
  if (found == regions.end() || found->second.place != Place::kRegistered) {
    Region* region = region_at((char*)pointer, 1);
    return violation(kNotRegistered, "cudaHostUnregister: %p is %s", pointer,
                     region ? "within pinned memory, not its beginning" : "not pinned");
  }
  if (const Work* user = pending_user((char*)pointer, found->second.bytes))
    return violation(kInvalidValue, "cudaHostUnregister: %s on stream %d still uses %p",
                     user->name.c_str(), user->stream, pointer);
  regions.erase(found);
  return kSuccess;
}

int cudaMemGetInfo(size_t* free, size_t* total) {
  FAKE_CALL("cudaMemGetInfo");
  *total = state().total_bytes;
  *free = state().total_bytes - state().used_bytes[current_device];
  return kSuccess;
}

}  // extern "C"
