// The state of the fake CUDA runtime: memory, streams, events, captures, graphs and queued
// operations. A device is the CPU, and its memory is ordinary memory; an operation runs when
// something waits for it, or earlier at random, in any order that streams and events allow.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace fake {

// Numbers as in driver_types.h.
enum Status : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidDevice = 101,
  kInvalidHandle = 400,
  kIllegalState = 401,
  kNotReady = 600,
  kIllegalAddress = 700,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
  kLaunchFailure = 719,
  kNotPermitted = 800,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureMerge = 902,
  kCaptureUnmatched = 903,
  kCaptureUnjoined = 904,
  kCaptureIsolation = 905,
  kCaptureImplicit = 906,
  kCapturedEvent = 907,
  kCaptureWrongThread = 908,
  kRace = 999,  // CUDA reports no races; the number is its cudaErrorUnknown
};

enum class Place { kDevice, kHostAlloc, kRegistered };

struct Region {  // from cudaMalloc, cudaHostAlloc or cudaHostRegister
  Place place;
  size_t bytes;
  int device;
  uint64_t id;
};

struct Block {  // a part of a region that an allocator has handed out or taken back
  size_t bytes;
  uint64_t id;
  bool is_live;
  bool is_pooled;  // of a pool of graphs, which may use it after it was taken back
};

struct Use {  // memory that an operation accesses
  char* start;
  size_t bytes;
  bool is_write;
  uint64_t region = 0;  // 0: ordinary host memory
  uint64_t block = 0;
  bool is_pooled = false;
};

struct Work {  // what an operation does; shared by a graph and its launches
  std::string name;
  int device = 0;
  int stream = 0;
  bool is_host = false;
  std::vector<Use> uses;
  std::function<int()> run;
  std::function<bool()> can_run;  // empty: as soon as what it follows has run
};
using WorkPtr = std::shared_ptr<Work>;

struct Operation {
  WorkPtr work;
  std::vector<uint64_t> deps;
  std::vector<uint64_t> ancestors;  // bit i: the operation with id base + i
  bool is_done = false;
  bool is_known = false;  // the host has waited for it
};

struct Node {
  WorkPtr work;
  std::set<int> deps;
};

struct Graph {
  std::vector<Node> nodes;
  bool is_alive = true;
  int omitted = -1;                // number of the edge that launches leave out; -1: none
  std::set<uint64_t> last_launch;  // operations of the last launch, which the next one follows
};

struct Stream;

struct Handover {  // a function that the host runs between two flags, see flags.cpp
  uint64_t done;
  void* argument;
};

constexpr int kServed = -1;  // stream of functions that the host runs

struct Capture {
  Stream* origin;
  int mode;
  std::thread::id thread;
  std::string broken_by;  // the message of the violation that invalidated it; empty: none did
  std::vector<Node> nodes;
  std::map<uint64_t, int> served;  // by the flag that ends it: the node of a function of the host
  int last_served = -1;
  bool is_active = true;
};

struct Stream {
  int number = 0, device = 0;
  bool is_blocking = false, is_alive = true;
  std::set<uint64_t> frontier;  // operations that the next one follows
  uint64_t last_served = 0;     // the last function of the host; 0: none
  std::shared_ptr<Capture> capture;
  std::set<int> captured;  // nodes of the capture that the next one follows
};

struct Event {
  int device = 0, number = 0;
  bool is_alive = true, is_recorded = false;
  std::set<uint64_t> frontier;
  std::shared_ptr<Capture> capture;
  std::set<int> captured;
};

struct State {
  std::recursive_mutex mutex;
  int num_devices = 1;
  size_t total_bytes = 0;
  std::vector<size_t> used_bytes;
  std::map<char*, Region> regions;
  std::map<char*, Block> blocks;
  std::map<char*, size_t> freed;
  std::map<void*, std::vector<Use>> declared;  // what a host function accesses, by its argument
  std::map<uint64_t, Handover> handovers;      // by the flag that begins it
  std::map<uint64_t, uint64_t> served;         // by the flag that ends it: its operation
  std::map<void*, std::unique_ptr<Stream>> streams;
  std::vector<Stream> legacy;
  std::map<void*, std::unique_ptr<Event>> events;
  std::map<void*, std::unique_ptr<Graph>> graphs, execs;
  std::vector<std::shared_ptr<Capture>> captures;
  std::deque<Operation> queue;
  uint64_t base = 0;  // id of the first operation of the queue
  uint64_t next_id = 1;
  std::mt19937_64 random;
  bool checks_races = true;
  bool is_hollow = false;  // memory is not touched, so that a device may be larger than the host
  int sticky = 0;
  std::string sticky_text;
  std::vector<std::string> violations;
  std::vector<std::string> log;  // names of operations in the order in which they ran
  int num_undeclared = 0;
};

State& state();
extern thread_local int current_device;
extern thread_local bool is_in_host_function;
extern thread_local std::string last_text;
extern thread_local int last_status;

// Notes a violation; returns its status.
int violation(int status, const char* format, ...) __attribute__((format(printf, 2, 3)));

// memory.cpp
Region* region_at(char* start, size_t bytes);
int resolve(Use& use, const char* name, int device, bool may_be_pageable);
int check_alive(const Work& work);
std::string about(char* address);

// queue.cpp
std::string conflict(const Work& first, const Work& second);
int enqueue(WorkPtr work, const std::set<uint64_t>& after, uint64_t* id);
int submit(Stream& stream, WorkPtr work);
int complete(const std::set<uint64_t>& targets);
int complete_device(int device);
void progress(uint64_t most);
bool is_done(const std::set<uint64_t>& targets);
const Work* pending_user(const char* start, size_t bytes);

}  // namespace fake
