// CUDA as TVM's text uses it, on the machine of fibers. What is not here does not compile, and so is noticed.
#pragma once
#include "machine.h"  // and no header of the standard library: reading those takes longer than compiling a kernel

extern "C" {
float exp2f(float), log2f(float), expf(float), logf(float), sinf(float), cosf(float), powf(float, float), tanhf(float);
float fabsf(float), floorf(float), ceilf(float), truncf(float), roundf(float), sqrtf(float), rsqrtf(float);
float fmaxf(float, float), fminf(float, float), fmaf(float, float, float);
double pow(double, double), floor(double), fmax(double, double), fmin(double, double);
}

#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __restrict__ __restrict
#define uint unsigned int
#define uchar unsigned char
#define ushort unsigned short
#define threadIdx (fiber_thread())
#define blockIdx (fiber_block())
#define blockDim (fiber_block_size())
#define gridDim (fiber_grid_size())

// --- types ----------------------------------------------------------------------------------------------------------

struct half {
  uint16_t bits;
  half() = default;
  UNWATCHED half(float value) : bits(float_to_half(value)) {}
  UNWATCHED half(double value) : half(float(value)) {}
  UNWATCHED half(int value) : half(float(value)) {}
  UNWATCHED operator float() const { return half_to_float(bits); }
};
struct nv_bfloat16 {
  uint16_t bits;
  nv_bfloat16() = default;
  UNWATCHED nv_bfloat16(float value) : bits(float_to_bfloat16(value)) {}
  UNWATCHED nv_bfloat16(double value) : nv_bfloat16(float(value)) {}
  UNWATCHED nv_bfloat16(int value) : nv_bfloat16(float(value)) {}
  UNWATCHED operator float() const { return bfloat16_to_float(bits); }
};
using __half = half;
using __nv_bfloat16 = nv_bfloat16;

#define VECTORS(type, name)                                                             \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };                              \
  struct name##3 { type x, y, z; };                                                     \
  struct alignas(4 * sizeof(type) < 16 ? 4 * sizeof(type) : 16) name##4 { type x, y, z, w; }; \
  UNWATCHED name##2 make_##name##2(type x, type y) { return {x, y}; }                   \
  UNWATCHED name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }        \
  UNWATCHED name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
VECTORS(float, float)
VECTORS(int, int)
VECTORS(unsigned, uint)
VECTORS(half, half)
VECTORS(unsigned short, ushort)
VECTORS(short, short)
VECTORS(long long, longlong)
struct uint1 { unsigned x; };
struct int1 { int x; };
struct nv_bfloat162 { nv_bfloat16 x, y; };

UNWATCHED half __float2half_rn(float value) { return half(value); }
UNWATCHED half __float2half(float value) { return half(value); }
UNWATCHED float __half2float(half value) { return value; }
UNWATCHED nv_bfloat16 __float2bfloat16(float value) { return nv_bfloat16(value); }
UNWATCHED float __bfloat162float(nv_bfloat16 value) { return value; }
UNWATCHED unsigned __pack_half2(half x, half y) { return unsigned(y.bits) << 16 | x.bits; }
UNWATCHED unsigned __pack_nv_bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return unsigned(y.bits) << 16 | x.bits; }
template <class To, class From>
UNWATCHED To same_bits(From value) {
  To result;
  memcpy(&result, &value, sizeof result);
  return result;
}
UNWATCHED int __float_as_int(float value) { return same_bits<int>(value); }
UNWATCHED float __int_as_float(int value) { return same_bits<float>(value); }
UNWATCHED unsigned __float_as_uint(float value) { return same_bits<unsigned>(value); }
UNWATCHED float __uint_as_float(unsigned value) { return same_bits<float>(value); }

UNWATCHED uint64_t __cvta_generic_to_global(const void* pointer) { return uint64_t(pointer); }

UNWATCHED float max(float a, float b) { return fmaxf(a, b); }  // as CUDA has it: a NaN loses
UNWATCHED float min(float a, float b) { return fminf(a, b); }
UNWATCHED double max(double a, double b) { return fmax(a, b); }
UNWATCHED double min(double a, double b) { return fmin(a, b); }
UNWATCHED int max(int a, int b) { return a > b ? a : b; }
UNWATCHED int min(int a, int b) { return a < b ? a : b; }
UNWATCHED int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
UNWATCHED int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
UNWATCHED unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
UNWATCHED unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
UNWATCHED float __expf(float value) { return expf(value); }
UNWATCHED float __exp2f(float value) { return exp2f(value); }
UNWATCHED float __logf(float value) { return logf(value); }
UNWATCHED float __log2f(float value) { return log2f(value); }
UNWATCHED float __sinf(float value) { return sinf(value); }
UNWATCHED float __cosf(float value) { return cosf(value); }
UNWATCHED float __powf(float base, float power) { return powf(base, power); }
UNWATCHED float __fdividef(float a, float b) { return a / b; }

// --- barriers, shuffles, votes --------------------------------------------------------------------------------------

#define FENCE asm volatile("" ::: "memory")  // nothing is kept in a register across it
#define __syncthreads() ((void)fiber_cta_barrier(__LINE__, 0))
#define __syncthreads_or(flag) (fiber_cta_barrier(__LINE__, flag))
UNWATCHED int fiber_cta_barrier(int line, int flag) {
  FENCE;
  int any = fiber_cta_sync(line, flag != 0);
  FENCE;
  return any;
}
UNWATCHED const uint32_t* fiber_act(Kind kind, int count = 0) {
  FENCE;
  const uint32_t* result = fiber_collective({kind, count});
  FENCE;
  return result;
}
UNWATCHED void __syncwarp(unsigned = ~0u) { fiber_act(SYNC); }
UNWATCHED int fiber_lane() {
  Index3 at = fiber_thread(), size = fiber_block_size();
  return (at.x + size.x * (at.y + size.y * at.z)) % 32;
}
template <class T>
UNWATCHED T fiber_shuffle(T value, int source, int width) {
  int lane = fiber_lane(), base = lane / width * width;
  bool inside = source >= base && source < base + width;
  uint32_t* operands = fiber_operands();
  memcpy(operands, &value, sizeof value);
  operands[2] = inside ? source : lane;
  T result;
  memcpy(&result, fiber_act(SHUFFLE), sizeof result);
  return result;
}
template <class T>
UNWATCHED T __shfl_sync(unsigned, T value, int source, int width = 32) {
  return fiber_shuffle(value, fiber_lane() / width * width + source % width, width);
}
template <class T>
UNWATCHED T __shfl_xor_sync(unsigned, T value, int mask, int width = 32) {
  return fiber_shuffle(value, fiber_lane() ^ mask, width);
}
template <class T>
UNWATCHED T __shfl_down_sync(unsigned, T value, int delta, int width = 32) {
  return fiber_shuffle(value, fiber_lane() + delta, width);
}
template <class T>
UNWATCHED T __shfl_up_sync(unsigned, T value, int delta, int width = 32) {
  return fiber_shuffle(value, fiber_lane() - delta, width);
}
UNWATCHED unsigned __activemask() { return ~0u; }
UNWATCHED unsigned __ballot_sync(unsigned, int predicate) {
  fiber_operands()[0] = predicate != 0;
  return fiber_act(VOTE)[0];
}
UNWATCHED int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }

// --- PTX, by the names of TVM's helpers -----------------------------------------------------------------------------

UNWATCHED unsigned __cvta_generic_to_shared(const void* pointer) { return fiber_shared_address(pointer); }

UNWATCHED void fiber_mma(Kind kind, float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2,
                         uint32_t a3, uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3) {
  uint32_t operands[] = {a0, a1, a2, a3, b0, b1};
  float start[] = {c0, c1, c2, c3}, sums[4];
  memcpy(fiber_operands(), operands, sizeof operands);
  memcpy(fiber_operands() + 6, start, sizeof start);
  memcpy(sums, fiber_act(kind), sizeof sums);
  d0 = sums[0], d1 = sums[1], d2 = sums[2], d3 = sums[3];
}
#define tvm_builtin_ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(...) fiber_mma(MMA_F16, __VA_ARGS__)
#define tvm_builtin_ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(...) fiber_mma(MMA_BF16, __VA_ARGS__)

template <class... Registers>
UNWATCHED void fiber_load_matrices(Kind kind, uint32_t address, Registers&... registers) {
  fiber_operands()[0] = address;
  const uint32_t* loaded = fiber_act(kind, sizeof...(registers));
  int i = 0;
  ((registers = loaded[i++]), ...);
}
#define LDMATRIX_HELPERS(suffix, kind)                                                                        \
  UNWATCHED void tvm_builtin_ptx_ldmatrix_sync_aligned_m8n8_x1_##suffix(uint32_t& a, uint32_t p) {            \
    fiber_load_matrices(kind, p, a);                                                                          \
  }                                                                                                           \
  UNWATCHED void tvm_builtin_ptx_ldmatrix_sync_aligned_m8n8_x2_##suffix(uint32_t& a, uint32_t& b, uint32_t p) { \
    fiber_load_matrices(kind, p, a, b);                                                                       \
  }                                                                                                           \
  UNWATCHED void tvm_builtin_ptx_ldmatrix_sync_aligned_m8n8_x4_##suffix(uint32_t& a, uint32_t& b, uint32_t& c,  \
                                                                        uint32_t& d, uint32_t p) {            \
    fiber_load_matrices(kind, p, a, b, c, d);                                                                 \
  }
LDMATRIX_HELPERS(shared_b16, LDMATRIX)
LDMATRIX_HELPERS(trans_shared_b16, LDMATRIX_TRANS)

UNWATCHED void tvm_builtin_ptx_cp_async_cg_async_cg_shared_global_16(uint32_t target, const void* source) {
  fiber_copy_async(target, source, 16, 16);
}
UNWATCHED void tvm_builtin_ptx_cp_async_cg_src_size_async_cg_shared_global_16(uint32_t target, const void* source,
                                                                              uint32_t source_bytes) {
  fiber_copy_async(target, source, 16, source_bytes);
}
UNWATCHED void tvm_builtin_ptx_cp_async_commit_group_async_commit_group() { fiber_commit(); }
UNWATCHED void tvm_builtin_ptx_cp_async_wait_group_async_wait_group_0() { FENCE; fiber_wait(0); FENCE; }
UNWATCHED void tvm_builtin_ptx_cp_async_wait_group_async_wait_group_1() { FENCE; fiber_wait(1); FENCE; }

UNWATCHED void tvm_builtin_ptx_cvt_f16x2_f32_rn_f16x2_f32(uint32_t& pair, float high, float low) {
  pair = __pack_half2(half(low), half(high));
}
UNWATCHED void tvm_builtin_ptx_cvt_bf16x2_f32_rn_bf16x2_f32(uint32_t& pair, float high, float low) {
  pair = __pack_nv_bfloat162(nv_bfloat16(low), nv_bfloat16(high));
}
UNWATCHED void tvm_builtin_ptx_ex2_approx_ftz_f32(float& power, float exponent) { power = exp2f(exponent); }
