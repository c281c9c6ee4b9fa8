// Hopper's instructions that C++ has no words for, as functions: products of a warp group (wgmma),
// barriers (mbarrier), boxes by the copy engine (cp.async.bulk.tensor).
//
// NVRTC compiles this without any header of a toolkit. Addresses of shared memory are the 32 bits
// that the instructions take.

#pragma once

typedef unsigned int u32;

// A box as the copy engine and the products see it: rows of 128 bytes, swizzled by 128, eight rows
// in 1024 bytes. The upper half of a matrix descriptor; the lower one is its place (`operand`).
constexpr int OPERAND = 1 << 30 | 64;

// What cuTensorMapEncodeTiled makes.
struct __align__(64) Map {
  char bytes[128];
};

#define OF_EIGHT(d, i)                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])

// d += a b or, where `add` is 0, d = a b: 64 rows by as many columns as twice the numbers that a
// thread holds, over 16 channels. Rows of `a` lie one after the other, or are its columns where it
// is `TRANSPOSED`.
template <int TRANSPOSED>
__device__ __forceinline__ void multiply(float (&d)[48], u32 a, u32 b, int add) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 a, b;\n"
      "setp.ne.b32 p, %50, 0;\n"
      "mov.b64 a, {%48, %52};\n"
      "mov.b64 b, {%49, %52};\n"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
      "}, a, b, p, 1, 1, %51, 0;\n"
      "}"
      : OF_EIGHT(d, 0), OF_EIGHT(d, 8), OF_EIGHT(d, 16), OF_EIGHT(d, 24), OF_EIGHT(d, 32),
        OF_EIGHT(d, 40)
      : "r"(a), "r"(b), "r"(add), "n"(TRANSPOSED), "n"(OPERAND));
}

template <int TRANSPOSED>
__device__ __forceinline__ void multiply(float (&d)[24], u32 a, u32 b, int add) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 a, b;\n"
      "setp.ne.b32 p, %26, 0;\n"
      "mov.b64 a, {%24, %28};\n"
      "mov.b64 b, {%25, %28};\n"
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23"
      "}, a, b, p, 1, 1, %27, 0;\n"
      "}"
      : OF_EIGHT(d, 0), OF_EIGHT(d, 8), OF_EIGHT(d, 16)
      : "r"(a), "r"(b), "r"(add), "n"(TRANSPOSED), "n"(OPERAND));
}

#undef OF_EIGHT

__device__ __forceinline__ u32 operand(u32 at) {
  u32 x = ((at & 0x3FFFF) >> 4) | (1 << 16);
  // Computed where it is used: kept in registers all along, there would be too many.
  asm volatile("" : "+r"(x));
  return x;
}

__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until no more than N committed groups of products are under way.
template <int N>
__device__ __forceinline__ void settle() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Nothing that reads `d` is moved before this.
template <int N>
__device__ __forceinline__ void keep(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ void init(u32 bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}

__device__ __forceinline__ void arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void expect(u32 bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void wait(u32 bar, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done_%=;\n"
      "bra again_%=;\n"
      "done_%=:\n"
      "}" ::"r"(bar),
      "r"(parity)
      : "memory");
}

// A box, whose bytes `bar` has been told to expect.
__device__ __forceinline__ void fetch(u32 to, const Map* map, int channel, int row, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(channel), "r"(row), "r"(bar)
      : "memory");
}

// What was written to shared memory, for products and the copy engine.
__device__ __forceinline__ void publish() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The 128 threads of a warp group.
template <int ID>
__device__ __forceinline__ void meet() {
  asm volatile("bar.sync %0, 128;" ::"n"(ID) : "memory");
}

// Whether any of 256 threads says so.
__device__ __forceinline__ bool anybody(bool mine) {
  u32 any;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.b32 p, %1, 0;\n"
      "bar.red.or.pred q, 3, 256, p;\n"
      "selp.u32 %0, 1, 0, q;\n"
      "}"
      : "=r"(any)
      : "r"(u32(mine))
      : "memory");
  return any;
}

// The same for a whole warp: the compiler may then hold it in a uniform register.
__device__ __forceinline__ int uniform(int x) {
  return __shfl_sync(~0u, x, 0);
}

// NVRTC does not know the macro.
__device__ __forceinline__ float minus_infinity() {
  return __int_as_float(0xff800000);
}

__device__ __forceinline__ float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two numbers in bf16, the first in the lower half.
__device__ __forceinline__ u32 pair(float low, float high) {
  u32 x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}

__device__ __forceinline__ float2 get2(u32 at) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at) : "memory");
  return x;
}

__device__ __forceinline__ float get(u32 at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return x;
}

__device__ __forceinline__ void put(u32 at, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}

__device__ __forceinline__ int geti(u32 at) {
  int x;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}

__device__ __forceinline__ void puti(u32 at, int x) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}
