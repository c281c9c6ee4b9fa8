// The experts' products from MXFP4 on Hopper: a program multiplies rows of weights by the tokens of a
// tile, as many columns of a product as there are tokens, in eights.
//
// Threads read the words that they multiply from memory into registers, two column tiles ahead:
// nobody else needs them. Tokens are everybody's: a column tile of them is copied into a ring of
// STAGES in shared memory, from which products read.
//
// Legend: N tokens; of a tile of 64 rows and 128 columns w p g h j q c as in `tiles`.

#include "cuda_hopper.cuh"

constexpr int TILE_BYTES = 4352;
constexpr int SCALES = 4096;
constexpr int GROUPS = THREADS / 128;
constexpr int STAGE_BYTES = MOST * 256;
constexpr int COPIED_ROWS = THREADS / 16;
constexpr int COPIES = (MOST + COPIED_ROWS - 1) / COPIED_ROWS;

static_assert(MOST % 8 == 0 && STAGES > 3);

// `Work` of `cuda_products.py`.
struct Work {
  const char* x;
  const int* pair;
  const int* tile;
  const char* w;
  void* y;
  int x_bytes;  // from a token's row to the next
  int active;
  int width_bytes;
  int out;
  int column_tiles;
  int row_tiles;
  float beta, linear_beta;  // 0: no cap
};

// What a thread multiplies of a column tile of each row tile.
struct Words {
  uint4 half[2][ROW_TILES];
  uint2 scales[ROW_TILES];
};

#define D4 "%0, %1, %2, %3"
#define D8 D4 ", %4, %5, %6, %7"
#define D12 D8 ", %8, %9, %10, %11"
#define D16 D12 ", %12, %13, %14, %15"
#define D20 D16 ", %16, %17, %18, %19"
#define D24 D20 ", %20, %21, %22, %23"
#define D28 D24 ", %24, %25, %26, %27"
#define D32 D28 ", %28, %29, %30, %31"
#define D36 D32 ", %32, %33, %34, %35"
#define D40 D36 ", %36, %37, %38, %39"
#define D44 D40 ", %40, %41, %42, %43"
#define D48 D44 ", %44, %45, %46, %47"
#define O(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define O4 O(0)
#define O8 O4, O(4)
#define O12 O8, O(8)
#define O16 O12, O(12)
#define O20 O16, O(16)
#define O24 O20, O(20)
#define O28 O24, O(24)
#define O32 O28, O(28)
#define O36 O32, O(32)
#define O40 O36, O(36)
#define O44 O40, O(40)
#define O48 O44, O(44)
#define PRODUCT(COLUMNS, D, O, A0, A1, A2, A3, B, HIGH)                                          \
  __device__ __forceinline__ void multiply(float (&d)[COLUMNS / 2], const u32 (&a)[4], u32 b) {  \
    asm volatile(                                                                                \
        "{\n"                                                                                    \
        ".reg .pred p;\n"                                                                        \
        ".reg .b64 b;\n"                                                                         \
        "setp.ne.b32 p, 1, 0;\n"                                                                 \
        "mov.b64 b, {%" #B ", %" #HIGH "};\n"                                                    \
        "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {" D "}, "               \
        "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, b, p, 1, 1, 0;\n"                             \
        "}"                                                                                      \
        : O                                                                                      \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(OPERAND));                     \
  }
PRODUCT(8, D4, O4, 4, 5, 6, 7, 8, 9)
PRODUCT(16, D8, O8, 8, 9, 10, 11, 12, 13)
PRODUCT(24, D12, O12, 12, 13, 14, 15, 16, 17)
PRODUCT(32, D16, O16, 16, 17, 18, 19, 20, 21)
PRODUCT(40, D20, O20, 20, 21, 22, 23, 24, 25)
PRODUCT(48, D24, O24, 24, 25, 26, 27, 28, 29)
PRODUCT(56, D28, O28, 28, 29, 30, 31, 32, 33)
PRODUCT(64, D32, O32, 32, 33, 34, 35, 36, 37)
PRODUCT(72, D36, O36, 36, 37, 38, 39, 40, 41)
PRODUCT(80, D40, O40, 40, 41, 42, 43, 44, 45)
PRODUCT(88, D44, O44, 44, 45, 46, 47, 48, 49)
PRODUCT(96, D48, O48, 48, 49, 50, 51, 52, 53)

#undef PRODUCT

__device__ __forceinline__ uint4 read16(const char* at) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at));
  return x;
}

__device__ __forceinline__ uint2 read8(const char* at) {
  uint2 x;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(x.x), "=r"(x.y)
               : "l"(at));
  return x;
}

__device__ __forceinline__ void copy16(u32 to, const char* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

// 2^126 times the scales of rows g (lower half) and g + 8: a byte s becomes s + 126 where a bf16 has
// its exponent.
template <int BYTE>
__device__ __forceinline__ u32 factors(u32 scales) {
  u32 two;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(two) : "r"(scales), "n"(0x4140 + 0x101 * BYTE));
  return two * 128 + 0x3F003F00;
}

// Both halves of `a` times the lower, or the upper, half of `f`.
template <bool UPPER>
__device__ __forceinline__ u32 times(u32 a, u32 f) {
  u32 x;
  if (UPPER)
    asm("{.reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {h, h};"
        " mul.rn.bf16x2 %0, %1, t;}" : "=r"(x) : "r"(a), "r"(f));
  else
    asm("{.reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {l, l};"
        " mul.rn.bf16x2 %0, %1, t;}" : "=r"(x) : "r"(a), "r"(f));
  return x;
}

// The left operand of a product, of a word (`triton_decode` says how).
__device__ __forceinline__ void values(u32 (&a)[4], u32 word, u32 f) {
  constexpr u32 PAIR = 0x81C081C0;
  a[0] = times<false>(word & PAIR, f);
  a[1] = times<true>(__funnelshift_l(word, word, 12) & PAIR, f);
  a[2] = times<false>((word << 6) & PAIR, f);
  a[3] = times<true>(((word << 2) & 0x80C080C0) | ((word >> 6) & 0x01000100), f);
}

__device__ __forceinline__ u32 of(const uint4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

__device__ __forceinline__ float tanh_(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float capped(float x, float cap) {
  return cap == 0 ? x : cap * tanh_(x * (1.0f / cap));
}

__device__ __forceinline__ float glu(float gate, float up, float beta, float linear_beta) {
  float sigmoid = reciprocal(1.0f + exp2_(gate * -1.4426950408889634f));
  return capped(gate, beta) * sigmoid * capped(up, linear_beta);
}

__device__ __forceinline__ void put_bf16(void* y, long at, float x) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  static_cast<unsigned short*>(y)[at] = bits;
}

template <bool GATED, int N>
struct Program {
  const Work& work;
  u32 ring;
  int first, end;  // places
  const char* w[ROW_TILES];  // the thread's words and scales, of the tile that is read next
  const char* s[ROW_TILES];
  const char* x[COPIES];  // the thread's 16 bytes of a token, of the first column tile
  int x_bytes[COPIES];    // 0 where nobody is

  template <int HALF, int ODD>
  __device__ __forceinline__ void read(Words& words) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
      words.half[HALF][m] = read16(w[m] + ODD * TILE_BYTES + HALF * 2048);
  }

  template <int ODD>
  __device__ __forceinline__ void read_scales(Words& words) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
      words.scales[m] = read8(s[m] + ODD * TILE_BYTES + SCALES);
  }

  __device__ __forceinline__ void find(int expert, int row_tile) {
    int thread = threadIdx.x % 128, chunk = threadIdx.x % 16;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
      long tile = static_cast<long>(expert) * work.row_tiles + row_tile + m;
      const char* matrix = work.w + tile * work.column_tiles * TILE_BYTES;
      w[m] = matrix + thread * 16;
      s[m] = matrix + thread / 4 * 8;
    }
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
      if (i * COPIED_ROWS >= N) break;
      int place = first + i * COPIED_ROWS + threadIdx.x / 16, row = 0;
      if (place < end) row = (work.pair ? work.pair[place] : place) / work.active;
      x[i] = work.x + static_cast<long>(row) * work.x_bytes + chunk * 16;
      x_bytes[i] = place < end ? 16 : 0;
    }
  }

  // A column tile of the tokens: two boxes of 64 columns, rows of 128 bytes, swizzled.
  __device__ __forceinline__ void copy(int k) {
    int chunk = threadIdx.x % 16;
    if (k < work.column_tiles) {
#pragma unroll
      for (int i = 0; i < COPIES; i++) {
        int row = i * COPIED_ROWS + threadIdx.x / 16;
        if (i * COPIED_ROWS >= N || row >= N) break;
        u32 to = ring + k % STAGES * STAGE_BYTES + chunk / 8 * (N * 128) + row * 128 +
                 ((chunk ^ row) & 7) * 16;
        bool inside = k * 256 + chunk * 16 < work.width_bytes;
        copy16(to, x[i] + k * 256, inside ? x_bytes[i] : 0);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  template <int HALF>
  __device__ __forceinline__ void multiply_half(float (&d)[ROW_TILES][N / 2],
                                                const Words& words, u32 box) {
    u32 scales[ROW_TILES][2];
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
      u32 four = HALF ? words.scales[m].y : words.scales[m].x;
      scales[m][0] = factors<0>(four);
      scales[m][1] = factors<2>(four);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u32 a[ROW_TILES][4];
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++) values(a[m], of(words.half[HALF][m], j), scales[m][j / 2]);
      begin_products();
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++) multiply(d[m], a[m], box + j * 2);
      commit();
      // Values of the products before last are free to be replaced.
      settle<1>();
    }
  }

  // `w` and `s` are two column tiles ahead.
  template <int ODD>
  __device__ __forceinline__ void step(float (&d)[ROW_TILES][N / 2], Words& words,
                                       int k) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 3) : "memory");
    publish();
    // Everybody's copies of k are there, and nobody reads what is overwritten now.
    __syncthreads();
    copy(k + STAGES - 2);
    u32 box = operand(ring + k % STAGES * STAGE_BYTES);
    bool more = k + 2 < work.column_tiles;
    multiply_half<0>(d, words, box);
    if (more) read<0, ODD>(words);
    multiply_half<1>(d, words, box + N * 8);
    if (more) read<1, ODD>(words), read_scales<ODD>(words);
  }

  __device__ __forceinline__ void finish(const float (&d)[ROW_TILES][N / 2], int row_tile) {
    int lane = threadIdx.x % 32, slab = threadIdx.x / 32 % 4, g = lane / 4, q = lane % 4;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
      int slabs = (row_tile + m) * 4 + slab;
#pragma unroll
      for (int i = 0; i < N / 2; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          int place = first + i * 2 + q * 2 + e;
          float upper = d[m][i + e], lower = d[m][i + 2 + e];
          if (place >= end) continue;
          long row = static_cast<long>(place) * work.out;
          if (GATED) {
            int o = slabs * 8 + g;
            float y = glu(upper, lower, work.beta, work.linear_beta);
            if (o < work.out) put_bf16(work.y, row + o, y);
          } else {
            int o = slabs * 16 + g;
            float* y = static_cast<float*>(work.y) + row;
            if (o < work.out) y[o] = upper;
            if (o + 8 < work.out) y[o + 8] = lower;
          }
        }
      }
    }
  }

  __device__ __forceinline__ void run(int expert, int row_tile) {
    // The last program's second warp group may have no rows: it takes part in copies and barriers.
    find(expert, min(row_tile, work.row_tiles - ROW_TILES));
    Words even, odd;
    read<0, 0>(even), read<1, 0>(even), read_scales<0>(even);
    if (work.column_tiles > 1) read<0, 1>(odd), read<1, 1>(odd), read_scales<1>(odd);
    for (int k = 0; k < STAGES - 2; k++) copy(k);
    float d[ROW_TILES][N / 2];
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
      for (int i = 0; i < N / 2; i++) d[m][i] = 0;
#pragma unroll 1
    for (int k = 0; k < work.column_tiles; k += 2) {
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++) w[m] += 2 * TILE_BYTES, s[m] += 2 * TILE_BYTES;
      step<0>(d, even, k);
      if (k + 1 < work.column_tiles) step<1>(d, odd, k + 1);
    }
    settle<0>();
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) keep(d[m]);
    if (row_tile < work.row_tiles) finish(d, row_tile);
  }
};

template <bool GATED>
__device__ __forceinline__ void product(const Work& work) {
  extern __shared__ __align__(1024) char shared[];
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  // Programs of one expert are neighbours: its tokens, and for its next tile its weights, are in
  // the L2 then.
  int programs = (work.row_tiles + GROUPS * ROW_TILES - 1) / (GROUPS * ROW_TILES);
  const int* tile = work.tile + blockIdx.x / programs * 3;
  if (tile[0] < 0) return;
  u32 ring = (static_cast<u32>(__cvta_generic_to_shared(shared)) + 1023) & ~1023u;
  int group = uniform(threadIdx.x / 128);
  int row_tile = (blockIdx.x % programs * GROUPS + group) * ROW_TILES;
  switch (max(LEAST, uniform(tile[2] - tile[1] + 7) & ~7)) {
#define CASE(N) \
  case N:       \
    return Program<GATED, N>{work, ring, tile[1], tile[2]}.run(tile[0], row_tile);
#if MOST == 32
    CASE(8)
    CASE(16)
    CASE(24)
    CASE(32)
#elif MOST == 96
    CASE(40)
    CASE(48)
    CASE(56)
    CASE(64)
    CASE(72)
    CASE(80)
    CASE(88)
    CASE(96)
#else
#error "cases for so many tokens are missing"
#endif
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS) gate_up(const Work work) {
  product<true>(work);
}

extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS) down(const Work work) {
  product<false>(work);
}
