// A multiprocessor made of fibers: one per CUDA thread, run in random order, stopped at the first fault.
//
// Kernels are compiled with -fsanitize=thread, whose calls before every memory access arrive here (`check`): an access
// must lie in a buffer of the launch, in allocated shared memory or on the thread's own stack, and two accesses to the
// same place in shared memory, one of them a write, must have a barrier between them. Data of cp.async belongs to nobody
// from its issue until the wait that lets it land.
#include "machine.h"

#include <algorithm>
#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <ucontext.h>
#include <vector>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

constexpr int WARP = 32, STACK_BYTES = 256 << 10, ARENA_BYTES = 512 << 10, GAP = 256, GRAIN = 2;
constexpr uint64_t MOST_RESUMPTIONS = 1ull << 30;  // some twenty seconds

struct Moment {  // when a thread did something: order is known across barriers only
  int thread = -1;
  uint32_t cta = 0, warp = 0;
  bool several = false;  // lanes of that warp
};
struct Place {  // what happened last to `GRAIN` bytes of shared memory
  Moment write, read;
  uint32_t many_readers = 0;  // the CTA epoch in which lanes of different warps read it
  int in_flight = -1;         // thread whose cp.async has not landed
};
struct Copy {
  char* target;
  const char* source;
  int bytes, zeros;
};
enum State { READY, AT_WARP, AT_CTA, DONE };
struct Fiber {
  ucontext_t first;
  jmp_buf place;
  char* stack = nullptr;
  bool begun = false;
  State state = DONE;
  Index3 thread;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};
struct Warp {
  int lanes = 0, arrived = 0;
  uint32_t epoch = 1;
  Collective wanted;
  uint32_t in[WARP][16], out[WARP][4];
};
struct Span {
  const char *begin, *end;
};

std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::vector<Place> places(ARENA_BYTES / GRAIN);
std::vector<Span> buffers, arrays;
std::vector<int> array_ids;
alignas(256) char arena[ARENA_BYTES];
int arena_used, dynamic_bytes, current, live, at_cta, cta_line, cta_any, cta_result;
uint32_t cta_epoch = 1, block_begin = 1;
bool failed;
uint64_t resumptions;
std::string fault;
jmp_buf scheduler;
void (*body)(void**);
void** arguments;
Index3 block_index, block_size, grid_size;
uint64_t random_state;

unsigned random_bits() {
  random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
  return unsigned(random_state >> 20);
}

void suspend() {
  Fiber& me = fibers[current];
  if (!_setjmp(me.place)) _longjmp(scheduler, 1);
}

[[noreturn]] void stop(const char* format, ...) {
  char text[400];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  fault = "block (" + std::to_string(block_index.x) + ", " + std::to_string(block_index.y) + ", " +
          std::to_string(block_index.z) + ") thread " + std::to_string(current) + ": " + text;
  failed = true;
  _longjmp(scheduler, 1);
}

// --- shared memory: bounds and races --------------------------------------------------------------------------------

Moment now() { return {current, cta_epoch, warps[current / WARP].epoch}; }

bool ordered(const Moment& then) {  // is what happened `then` over for the current thread?
  if (then.thread < 0 || then.cta < cta_epoch) return true;
  if (then.thread / WARP != current / WARP) return false;
  return then.warp < warps[current / WARP].epoch || (then.thread == current && !then.several);
}

const Span* array_of(const char* address, size_t bytes) {
  for (const Span& span : arrays)
    if (address >= span.begin && address + bytes <= span.end) return &span;
  return nullptr;
}

void check_shared(const char* address, size_t bytes, bool writes) {
  if (!array_of(address, bytes))
    stop("%s of %zu bytes at %td of shared memory, outside of its arrays", writes ? "write" : "read", bytes,
         address - arena);
  for (size_t at = (address - arena) / GRAIN; at < (address - arena + bytes + GRAIN - 1) / GRAIN; at++) {
    Place& place = places[at];
    const char* doing = writes ? "write" : "read";
    if (place.in_flight >= 0 && place.write.cta >= block_begin)
      stop("%s at byte %zu of shared memory, where a cp.async of thread %d has not landed", doing, at * GRAIN,
           place.in_flight);
    if (!writes && (place.write.thread < 0 || place.write.cta < block_begin))
      stop("read at byte %zu of shared memory, which nobody has written", at * GRAIN);
    if (!ordered(place.write))
      stop("%s at byte %zu of shared memory, written by thread %d without a barrier between", doing, at * GRAIN,
           place.write.thread);
    if (writes) {
      if (!ordered(place.read) || place.many_readers == cta_epoch)
        stop("write at byte %zu of shared memory, read by thread %d without a barrier between", at * GRAIN,
             place.read.thread);
      place.write = now();
      place.in_flight = -1;
    } else {
      bool beside = !ordered(place.read);
      if (beside && place.read.thread / WARP != current / WARP) place.many_readers = cta_epoch;
      place.read = now();
      place.read.several = beside;
    }
  }
}

void check(const void* pointer, size_t bytes, bool writes) {
  const char* address = static_cast<const char*>(pointer);
  const char* stack = fibers[current].stack;
  if (address >= stack && address < stack + STACK_BYTES) return;
  if (address >= reinterpret_cast<char*>(&*warps.begin()) && address < reinterpret_cast<char*>(&*warps.end())) return;
  if (address >= arena && address < arena + ARENA_BYTES) return check_shared(address, bytes, writes);
  for (const Span& span : buffers)
    if (address >= span.begin && address + bytes <= span.end) return;
  ptrdiff_t off = PTRDIFF_MAX;
  int nearest = -1;
  for (size_t i = 0; i < buffers.size(); i++) {
    ptrdiff_t distance = address < buffers[i].begin ? buffers[i].begin - address : address - buffers[i].end + 1;
    if (distance < off) off = distance, nearest = int(i);
  }
  stop("%s of %zu bytes outside of every buffer, nearest to pointer argument %d, at byte %td of its %td",
       writes ? "write" : "read", bytes, nearest, nearest < 0 ? 0 : address - buffers[nearest].begin,
       nearest < 0 ? 0 : buffers[nearest].end - buffers[nearest].begin);
}

// --- what a warp does together --------------------------------------------------------------------------------------

float widen(uint32_t pair, int high, bool brain) {
  uint16_t bits = uint16_t(high ? pair >> 16 : pair);
  return brain ? bfloat16_to_float(bits) : half_to_float(bits);
}

void multiply(Warp& warp, bool brain) {  // m16n8k16, fragments as in the PTX manual
  float a[16][16], b[16][8];
  for (int lane = 0; lane < WARP; lane++)
    for (int k = 0; k < 8; k++)
      a[lane / 4 + 8 * (k / 2 % 2)][lane % 4 * 2 + k % 2 + 8 * (k / 4)] = widen(warp.in[lane][k / 2], k % 2, brain);
  for (int lane = 0; lane < WARP; lane++)
    for (int k = 0; k < 4; k++) b[lane % 4 * 2 + k % 2 + 8 * (k / 2)][lane / 4] = widen(warp.in[lane][4 + k / 2], k % 2, brain);
  for (int lane = 0; lane < WARP; lane++)
    for (int i = 0; i < 4; i++) {
      int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
      float start;
      memcpy(&start, &warp.in[lane][6 + i], 4);
      double sum = start;
      for (int k = 0; k < 16; k++) sum += double(a[row][k]) * b[k][column];
      float result = float(sum);
      memcpy(&warp.out[lane][i], &result, 4);
    }
}

void load_matrices(Warp& warp, int matrices, bool transposed) {
  int me = current;
  for (int provider = 0; provider < 8 * matrices; provider++) {
    current = me / WARP * WARP + provider;
    char* row = arena + warp.in[provider][0];
    if (warp.in[provider][0] % 16) stop("ldmatrix of a row at byte %u of shared memory, no multiple of 16", warp.in[provider][0]);
    check(row, 16, false);
  }
  current = me;
  for (int lane = 0; lane < WARP; lane++)
    for (int matrix = 0; matrix < matrices; matrix++) {
      uint16_t half[2];
      for (int i = 0; i < 2; i++) {
        int row = lane / 4, column = lane % 4 * 2 + i;
        if (transposed) std::swap(row, column);
        memcpy(&half[i], arena + warp.in[8 * matrix + row][0] + 2 * column, 2);
      }
      warp.out[lane][matrix] = half[0] | uint32_t(half[1]) << 16;
    }
}

void shuffle(Warp& warp) {  // in: value (two words), source lane
  for (int lane = 0; lane < WARP; lane++) {
    uint32_t source = warp.in[lane][2];
    memcpy(warp.out[lane], warp.in[int(source) < warp.lanes ? source : lane], 8);
  }
}

void vote(Warp& warp) {
  uint32_t ballot = 0;
  for (int lane = 0; lane < warp.lanes; lane++) ballot |= uint32_t(warp.in[lane][0] != 0) << lane;
  for (int lane = 0; lane < WARP; lane++) warp.out[lane][0] = ballot;
}

void act(Warp& warp) {
  switch (warp.wanted.kind) {
    case SYNC: break;
    case SHUFFLE: shuffle(warp); break;
    case VOTE: vote(warp); break;
    case MMA_F16: multiply(warp, false); break;
    case MMA_BF16: multiply(warp, true); break;
    case LDMATRIX: load_matrices(warp, warp.wanted.count, false); break;
    case LDMATRIX_TRANS: load_matrices(warp, warp.wanted.count, true); break;
  }
}

// --- scheduling -----------------------------------------------------------------------------------------------------

void release_cta() {
  for (Fiber& fiber : fibers)
    if (fiber.state == AT_CTA) fiber.state = READY;
  at_cta = 0, cta_result = cta_any, cta_any = 0;
  cta_epoch++;
}

void trampoline() {
  for (;;) {
    body(arguments);
    Fiber& me = fibers[current];
    fiber_commit();
    for (; !me.groups.empty(); me.groups.pop_front())
      if (!me.groups.front().empty()) stop("the thread ends with a cp.async that it never waited for");
    me.state = DONE;
    live--;
    if (live && at_cta == live) release_cta();
    suspend();
  }
}

void resume(int thread) {
  current = thread;
  Fiber& fiber = fibers[thread];
  if (_setjmp(scheduler)) return;
  if (++resumptions > MOST_RESUMPTIONS) stop("the launch does not come to an end");
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  if (!fiber.stack) fiber.stack = static_cast<char*>(malloc(STACK_BYTES));
  getcontext(&fiber.first);
  fiber.first.uc_stack.ss_sp = fiber.stack;
  fiber.first.uc_stack.ss_size = STACK_BYTES;
  fiber.first.uc_link = nullptr;
  makecontext(&fiber.first, trampoline, 0);
  setcontext(&fiber.first);
}

bool is_ready(const Warp& warp) {
  size_t first = (&warp - warps.data()) * WARP;
  for (int lane = 0; lane < warp.lanes; lane++)
    if (fibers[first + lane].state == READY) return true;
  return false;
}

void run_warp(int index) {
  Warp& warp = warps[index];
  int offset = random_bits() % warp.lanes;
  for (int i = 0; i < warp.lanes && !failed; i++) {
    int thread = index * WARP + (i + offset) % warp.lanes;
    if (fibers[thread].state == READY) resume(thread);
  }
}

void explain_deadlock() {
  int warp_waits = 0, cta_waits = 0;
  for (size_t i = 0; i < fibers.size(); i++) {
    warp_waits += fibers[i].state == AT_WARP, cta_waits += fibers[i].state == AT_CTA;
    if (fibers[i].state == AT_WARP || fibers[i].state == AT_CTA) current = int(i);
  }
  if (!_setjmp(scheduler))
    stop("deadlock: %d threads wait for their warp, %d for the block, %zu are done", warp_waits, cta_waits,
         fibers.size() - live);
}

void run_block(int threads) {
  block_begin = ++cta_epoch;
  live = threads, at_cta = 0, cta_any = 0, arena_used = dynamic_bytes ? dynamic_bytes + GAP : 0;
  arrays.clear(), array_ids.clear();
  if (dynamic_bytes) arrays.push_back({arena, arena + dynamic_bytes}), array_ids.push_back(-1);
  memset(arena, 0xff, ARENA_BYTES);  // NaN in every format
  for (int i = 0; i < threads; i++) {
    fibers[i].state = READY;
    fibers[i].thread = {i % block_size.x, i / block_size.x % block_size.y, i / (block_size.x * block_size.y)};
  }
  for (size_t w = 0; w < warps.size(); w++) {
    warps[w].lanes = std::min(WARP, threads - int(w) * WARP);
    warps[w].arrived = 0;
  }
  std::vector<int> ready;
  while (live && !failed) {
    ready.clear();
    for (size_t w = 0; w < warps.size(); w++)
      if (is_ready(warps[w])) ready.push_back(int(w));
    if (ready.empty()) return explain_deadlock();
    int chosen = ready[random_bits() % ready.size()];
    for (int burst = 1 << random_bits() % 9; burst > 0 && !failed && is_ready(warps[chosen]); burst--) run_warp(chosen);
  }
}

}  // namespace

// --- what kernels call ----------------------------------------------------------------------------------------------

Index3 fiber_thread() { return fibers[current].thread; }
Index3 fiber_block() { return block_index; }
Index3 fiber_block_size() { return block_size; }
Index3 fiber_grid_size() { return grid_size; }

#if defined(__F16C__)
float half_to_float(uint16_t bits) { return _cvtsh_ss(bits); }
uint16_t float_to_half(float value) { return _cvtss_sh(value, 0); }
#else
float half_to_float(uint16_t bits) {
  __fp16 value;
  memcpy(&value, &bits, 2);
  return value;
}
uint16_t float_to_half(float value) {
  __fp16 narrow = value;
  uint16_t bits;
  memcpy(&bits, &narrow, 2);
  return bits;
}
#endif

void* fiber_shared(int id, size_t bytes) {
  for (size_t i = 0; i < array_ids.size(); i++)
    if (array_ids[i] == id) return const_cast<char*>(arrays[i].begin);
  arena_used = (arena_used + GAP - 1) / GAP * GAP;
  if (arena_used + bytes > ARENA_BYTES) stop("%zu bytes more of shared memory than there are", bytes);
  char* begin = arena + arena_used;
  arrays.push_back({begin, begin + bytes}), array_ids.push_back(id);
  arena_used += int(bytes) + GAP;
  return begin;
}
void* fiber_dynamic() { return arena; }
uint32_t fiber_shared_address(const void* pointer) {
  const char* address = static_cast<const char*>(pointer);
  if (address < arena || address >= arena + ARENA_BYTES) stop("an address that is not of shared memory is used as one");
  return uint32_t(address - arena);
}

int fiber_cta_sync(int line, int flag) {
  if (at_cta && line != cta_line) stop("a barrier in line %d, while other threads wait at that in line %d", line, cta_line);
  cta_line = line;
  cta_any |= flag;
  fibers[current].state = AT_CTA;
  if (++at_cta == live) {
    fibers[current].state = READY;
    release_cta();
  } else {
    suspend();
  }
  return cta_result;
}

uint32_t* fiber_operands() { return warps[current / WARP].in[current % WARP]; }
const uint32_t* fiber_collective(Collective wanted) {
  Warp& warp = warps[current / WARP];
  if (warp.arrived && !(warp.wanted == wanted)) stop("lanes of a warp are at different collective instructions");
  warp.wanted = wanted;
  if (++warp.arrived < warp.lanes) {
    fibers[current].state = AT_WARP;
    suspend();
  } else {
    act(warp);
    warp.arrived = 0;
    warp.epoch++;
    for (int lane = 0; lane < warp.lanes; lane++) {
      Fiber& fiber = fibers[current / WARP * WARP + lane];
      if (fiber.state == AT_WARP) fiber.state = READY;
    }
  }
  return warp.out[current % WARP];
}

void fiber_copy_async(uint32_t target, const void* source, int bytes, int source_bytes) {
  char* place = arena + target;
  if (target % bytes || reinterpret_cast<uintptr_t>(source) % bytes)
    stop("cp.async of %d bytes between unaligned addresses", bytes);
  if (source_bytes < 0 || source_bytes > bytes) stop("cp.async of %d bytes reads %d", bytes, source_bytes);
  if (source_bytes) check(source, source_bytes, false);
  check_shared(place, bytes, true);
  for (int at = 0; at < bytes; at += GRAIN) places[(target + at) / GRAIN].in_flight = current;
  Copy copy{place, static_cast<const char*>(source), source_bytes, bytes - source_bytes};
  if (random_bits() & 1) memcpy(place, source, source_bytes);
  fibers[current].open.push_back(copy);
}
void fiber_commit() {
  Fiber& me = fibers[current];
  me.groups.push_back(std::move(me.open));
  me.open.clear();
}
void fiber_wait(int pending) {
  Fiber& me = fibers[current];
  for (; int(me.groups.size()) > pending; me.groups.pop_front())
    for (const Copy& copy : me.groups.front()) {
      memcpy(copy.target, copy.source, copy.bytes);
      memset(copy.target + copy.bytes, 0, copy.zeros);
      for (int at = 0; at < copy.bytes + copy.zeros; at += GRAIN) {
        Place& place = places[(copy.target - arena + at) / GRAIN];
        place.in_flight = -1, place.write = now();
      }
    }
}

extern "C" {
// Runs a kernel; returns its first fault, or null. `spans` are begin and end of the `count` pointer arguments.
const char* fiber_launch(void (*kernel)(void**), void** args, const int* grid, const int* block, int dynamic,
                         uint64_t seed, const void** spans, int count) {
  body = kernel, arguments = args, failed = false, resumptions = 0, dynamic_bytes = dynamic;
  grid_size = {grid[0], grid[1], grid[2]}, block_size = {block[0], block[1], block[2]};
  random_state = (seed + 1) * 0x9E3779B97F4A7C15ull;
  buffers.clear();
  for (int i = 0; i < count; i++)
    buffers.push_back({static_cast<const char*>(spans[2 * i]), static_cast<const char*>(spans[2 * i + 1])});
  int threads = block[0] * block[1] * block[2];
  for (Fiber& fiber : fibers) free(fiber.stack);
  fibers = std::vector<Fiber>(threads);
  warps = std::vector<Warp>((threads + WARP - 1) / WARP);
  std::vector<int> order(size_t(grid[0]) * grid[1] * grid[2]);
  for (size_t i = 0; i < order.size(); i++) {  // blocks run in any order
    size_t j = random_bits() % (i + 1);
    order[i] = order[j], order[j] = int(i);
  }
  for (size_t i = 0; i < order.size() && !failed; i++) {
    block_index = {order[i] % grid[0], order[i] / grid[0] % grid[1], order[i] / (grid[0] * grid[1])};
    run_block(threads);
  }
  return failed ? fault.c_str() : nullptr;
}

#define WATCH(bytes)                                                                 \
  void __tsan_read##bytes(void* p) { check(p, bytes, false); }                       \
  void __tsan_write##bytes(void* p) { check(p, bytes, true); }                       \
  void __tsan_unaligned_read##bytes(void* p) { check(p, bytes, false); }             \
  void __tsan_unaligned_write##bytes(void* p) { check(p, bytes, true); }             \
  void __tsan_volatile_read##bytes(void* p) { check(p, bytes, false); }              \
  void __tsan_volatile_write##bytes(void* p) { check(p, bytes, true); }
WATCH(1) WATCH(2) WATCH(4) WATCH(8) WATCH(16)
void __tsan_read_range(void* p, size_t bytes) { check(p, bytes, false); }
void __tsan_write_range(void* p, size_t bytes) { check(p, bytes, true); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
