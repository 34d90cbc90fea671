// What the emulated kernels ask of the machine.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>
struct Index3 {
  int x, y, z;
};
enum Kind { SYNC, SHUFFLE, VOTE, MMA_F16, MMA_BF16, LDMATRIX, LDMATRIX_TRANS };
struct Collective {
  Kind kind;
  int count;
  bool operator==(const Collective& other) const { return kind == other.kind && count == other.count; }
};

__attribute__((const)) Index3 fiber_thread();
Index3 fiber_block();
Index3 fiber_block_size();
Index3 fiber_grid_size();
__attribute__((const)) float half_to_float(uint16_t bits);
__attribute__((const)) uint16_t float_to_half(float value);
void* fiber_shared(int id, size_t bytes);
void* fiber_dynamic();
uint32_t fiber_shared_address(const void* pointer);
int fiber_cta_sync(int line, int flag);
uint32_t* fiber_operands();
const uint32_t* fiber_collective(Collective wanted);
void fiber_copy_async(uint32_t target, const void* source, int bytes, int source_bytes);
void fiber_commit();
void fiber_wait(int pending);

#define UNWATCHED __attribute__((no_sanitize("thread"), always_inline)) inline

UNWATCHED float bfloat16_to_float(uint16_t bits) {
  uint32_t wide = uint32_t(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
UNWATCHED uint16_t float_to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
