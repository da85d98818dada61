// Captures and graphs, and calls for tests, which CUDA does not have.

#include <algorithm>
#include <sstream>

#include "api.h"

namespace fake {
namespace {

void end(Capture& capture) {
  auto& s = state();
  capture.is_active = false;
  auto leave = [&](Stream& stream) {
    if (stream.capture.get() != &capture) return;
    stream.capture.reset();
    stream.captured.clear();
  };
  for (auto& [handle, stream] : s.streams) leave(*stream);
  for (auto& stream : s.legacy) leave(stream);
  s.captures.erase(std::remove_if(s.captures.begin(), s.captures.end(),
                                  [&](auto& other) { return other.get() == &capture; }),
                   s.captures.end());
}

// A node that was not joined to the stream that began the capture, or -1.
int unjoined(const Capture& capture, const std::set<int>& tail) {
  std::vector<bool> is_followed(capture.nodes.size());
  std::vector<int> left(tail.begin(), tail.end());
  while (!left.empty()) {
    const int node = left.back();
    left.pop_back();
    if (is_followed[node]) continue;
    is_followed[node] = true;
    left.insert(left.end(), capture.nodes[node].deps.begin(), capture.nodes[node].deps.end());
  }
  const auto found = std::find(is_followed.begin(), is_followed.end(), false);
  return found == is_followed.end() ? -1 : int(found - is_followed.begin());
}

Graph* graph_of(std::map<void*, std::unique_ptr<Graph>>& graphs, const char* name, void* handle) {
  auto found = graphs.find(handle);
  if (found == graphs.end() || !found->second->is_alive) {
    violation(kInvalidHandle, "%s: a graph that %s", name,
              found == graphs.end() ? "was never made" : "was destroyed");
    return nullptr;
  }
  return found->second.get();
}

void* keep(std::map<void*, std::unique_ptr<Graph>>& graphs, std::vector<Node> nodes) {
  auto graph = std::make_unique<Graph>();
  graph->nodes = std::move(nodes);
  void* handle = graph.get();
  graphs[handle] = std::move(graph);
  return handle;
}

int destroy(std::map<void*, std::unique_ptr<Graph>>& graphs, const char* name, void* handle) {
  Graph* graph = graph_of(graphs, name, handle);
  if (!graph) return last_status;
  graph->is_alive = false;
  graph->nodes.clear();
  return kSuccess;
}

int launch(Graph& graph, Stream& stream) {
  for (const Node& node : graph.nodes)
    if (const int status = check_alive(*node.work)) return status;
  std::set<uint64_t> before = stream.frontier, all;
  before.insert(graph.last_launch.begin(), graph.last_launch.end());
  std::vector<uint64_t> ids;
  int edge = 0;
  for (const Node& node : graph.nodes) {
    std::set<uint64_t> after = before;
    for (const int dep : node.deps)
      if (edge++ != graph.omitted) after.insert(ids[dep]);
    uint64_t id;
    if (const int status = enqueue(node.work, after, &id)) {
      for (size_t i = 0; i < ids.size(); i++) state().queue.pop_back();  // all nodes or none
      return status;
    }
    ids.push_back(id);
    all.insert(id);
  }
  if (!ids.empty()) stream.frontier = graph.last_launch = all;
  return kSuccess;
}

void describe(std::ostream& out, const Graph& graph) {
  int edge = 0;
  for (size_t i = 0; i < graph.nodes.size(); i++) {
    const Work& work = *graph.nodes[i].work;
    out << "node\t" << i << "\t" << work.name << "\t" << work.stream;
    for (const Use& use : work.uses)
      out << "\t" << (use.is_write ? "w" : "r") << " " << (uintptr_t)use.start << " " << use.bytes;
    out << "\n";
    for (const int dep : graph.nodes[i].deps)
      out << "edge\t" << edge++ << "\t" << dep << "\t" << i << "\n";
  }
}

}  // namespace
}  // namespace fake

using namespace fake;

extern "C" {

int cudaStreamBeginCapture(void* handle, int mode) {
  FAKE_CALL("cudaStreamBeginCapture");
  auto found = state().streams.find(handle);
  if (found == state().streams.end() || !found->second->is_alive)
    return violation(kCaptureUnsupported,
                     "cudaStreamBeginCapture: the default stream, or one that"
                     " was destroyed, cannot be captured");
  Stream& stream = *found->second;
  if (stream.capture)
    return violation(kIllegalState, "cudaStreamBeginCapture: stream %d is captured already",
                     stream.number);
  stream.capture = std::make_shared<Capture>();
  stream.capture->origin = &stream;
  stream.capture->mode = mode;
  stream.capture->thread = std::this_thread::get_id();
  state().captures.push_back(stream.capture);
  return kSuccess;
}

int cudaStreamEndCapture(void* handle, void** graph) {
  FAKE_CALL("cudaStreamEndCapture");
  *graph = nullptr;
  auto found = state().streams.find(handle);
  if (found == state().streams.end() || !found->second->capture)
    return violation(kIllegalState, "cudaStreamEndCapture: the stream is not captured");
  Stream& stream = *found->second;
  const std::shared_ptr<Capture> capture = stream.capture;
  if (capture->origin != &stream) {
    const int origin = capture->origin->number;
    end(*capture);
    return violation(kCaptureUnmatched,
                     "cudaStreamEndCapture: the capture began on stream %d, not"
                     " on %d",
                     origin, stream.number);
  }
  if (capture->mode != 2 && capture->thread != std::this_thread::get_id())
    return violation(kCaptureWrongThread, "cudaStreamEndCapture: another thread began the capture");
  const std::set<int> tail = stream.captured;
  end(*capture);
  if (!capture->broken_by.empty()) {
    last_text = "the capture is invalid: " + capture->broken_by;
    return last_status = kCaptureInvalidated;
  }
  const int loose = unjoined(*capture, tail);
  if (loose >= 0)
    return violation(kCaptureUnjoined,
                     "cudaStreamEndCapture: stream %d was not joined: its %s is not"
                     " waited for",
                     capture->nodes[loose].work->stream, capture->nodes[loose].work->name.c_str());
  *graph = keep(state().graphs, capture->nodes);
  return kSuccess;
}

int cudaGraphInstantiate(void** exec, void* handle, unsigned long long) {
  FAKE_CALL("cudaGraphInstantiate");
  Graph* graph = graph_of(state().graphs, "cudaGraphInstantiate", handle);
  if (!graph) return last_status;
  *exec = keep(state().execs, graph->nodes);
  return kSuccess;
}

int cudaGraphLaunch(void* exec, void* handle) {
  FAKE_CALL("cudaGraphLaunch");
  Graph* graph = graph_of(state().execs, "cudaGraphLaunch", exec);
  if (!graph) return last_status;
  Stream* stream = stream_of("cudaGraphLaunch", handle);
  if (!stream) return last_status;
  // CUDA would add the graph to the capture as a child; hotsplit never launches one there.
  if (const int status = refused_if_captured("cudaGraphLaunch", *stream)) return status;
  if (const int status = may_submit("cudaGraphLaunch", *stream)) return status;
  return launch(*graph, *stream);
}

int cudaGraphDestroy(void* graph) {
  FAKE_CALL("cudaGraphDestroy");
  return destroy(state().graphs, "cudaGraphDestroy", graph);
}

int cudaGraphExecDestroy(void* exec) {
  FAKE_CALL("cudaGraphExecDestroy");
  return destroy(state().execs, "cudaGraphExecDestroy", exec);
}

const char* cudaGetErrorString(int status) { return status == last_status ? last_text.c_str() : ""; }

// Resets the runtime. Graphs, streams and events made before must not be used any more.
void fakeReset(int num_devices, size_t bytes, uint64_t seed, int is_hollow) {
  auto& s = state();
  std::lock_guard<std::recursive_mutex> guard(s.mutex);
  s.queue.clear();
  s.base = 1;
  s.captures.clear();
  s.execs.clear();
  s.graphs.clear();
  s.streams.clear();
  s.events.clear();
  s.regions.clear();
  s.blocks.clear();
  s.freed.clear();
  s.declared.clear();
  s.handovers.clear();
  s.served.clear();
  s.violations.clear();
  s.log.clear();
  s.num_undeclared = s.sticky = 0;
  s.num_devices = num_devices;
  s.total_bytes = bytes;
  s.used_bytes.assign(num_devices, 0);
  s.legacy.assign(num_devices, Stream());
  for (int i = 0; i < num_devices; i++) s.legacy[i].device = i;
  s.random.seed(seed);
  s.checks_races = true;
  s.is_hollow = is_hollow;
  current_device = 0;
  last_status = 0;
  last_text.clear();
}

void fakeCheckRaces(int checks) { state().checks_races = checks != 0; }

// Lets a process clean up even after a failure of the device: drops queued operations and captures.
void fakeForgive() {
  auto& s = state();
  std::lock_guard<std::recursive_mutex> guard(s.mutex);
  s.sticky = 0;
  s.base += s.queue.size();
  s.queue.clear();
  while (!s.captures.empty()) end(*std::shared_ptr<Capture>(s.captures.front()));
}

void fakeSeed(uint64_t seed) { state().random.seed(seed); }

// Declares what the host function with this argument accesses.
void fakeDeclare(void* argument, int count, char** starts, const int64_t* bytes, const int* is_write) {
  std::lock_guard<std::recursive_mutex> guard(state().mutex);
  std::vector<Use> uses;
  for (int i = 0; i < count; i++)
    if (bytes[i]) uses.push_back({starts[i], size_t(bytes[i]), is_write[i] != 0});
  state().declared[argument] = uses;
}

// Notes that an allocator has handed out a part of its memory (1, or 2 from a pool of graphs), or taken it
// back (0). Pinned memory must
// not be in use when it is taken back, because the host may write it at once.
int fakeBlock(char* start, size_t bytes, int is_live) {
  std::lock_guard<std::recursive_mutex> guard(state().mutex);
  auto& blocks = state().blocks;
  blocks.erase(blocks.lower_bound(start), blocks.lower_bound(start + bytes));
  blocks[start] = {bytes, state().next_id++, is_live != 0, is_live == 2};
  Region* region = region_at(start, bytes);
  if (!region) return violation(kInvalidValue, "a block outside of all allocations");
  const Work* user = region->place == Place::kHostAlloc ? pending_user(start, bytes) : nullptr;
  if (!is_live && user)
    return violation(kInvalidValue, "pinned memory is freed while %s on stream %d still uses it",
                     user->name.c_str(), user->stream);
  return kSuccess;
}

int fakeIsPinned(char* start) {
  Region* region = region_at(start, 1);
  return region && region->place != Place::kDevice;
}

int fakeNumUndeclared() { return state().num_undeclared; }

// The lines of "violations", "log" or "left" (memory that is still allocated or pinned), in a text
// that the next call of this function replaces.
const char* fakeText(const char* what) {
  std::lock_guard<std::recursive_mutex> guard(state().mutex);
  static std::string text;
  std::ostringstream out;
  const std::string asked = what;
  static const char* const names[] = {"device", "pinned", "registered"};
  if (asked == "violations")
    for (auto& line : state().violations) out << line << "\n";
  if (asked == "log")
    for (auto& line : state().log) out << line << "\n";
  if (asked == "left")
    for (auto& [start, region] : state().regions)
      out << names[int(region.place)] << " " << region.bytes << "\n";
  text = out.str();
  return text.c_str();
}

const char* fakeGraphText(void* exec) {
  std::lock_guard<std::recursive_mutex> guard(state().mutex);
  static std::string text;
  std::ostringstream out;
  if (Graph* graph = graph_of(state().execs, "fakeGraphText", exec)) describe(out, *graph);
  text = out.str();
  return text.c_str();
}

// Leaves an edge of a graph out of its further launches; -1: none.
void fakeGraphOmit(void* exec, int edge) {
  if (Graph* graph = graph_of(state().execs, "fakeGraphOmit", exec)) graph->omitted = edge;
}

}  // extern "C"
