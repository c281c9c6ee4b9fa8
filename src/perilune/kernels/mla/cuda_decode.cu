// Programs of MLA decode for K3's 512 + 64 channels: 96 heads as they are, not padded to 128.
//
// Legend: a tile is 64 tokens of one sequence, a box 64 tokens by 64 channels of it (K3's row has
// nine boxes); a program has 96 query rows (`row = query token * heads + head`) of one query token.
// A share is the stretch of tiles that a team of programs has, a part what one program makes of one
// sequence: `triton_decode_share` says how they are numbered, `triton_decode_merge` what becomes of
// parts.
//
// Heads are the columns of both products, which may be any multiple of 8: scores are t[token, head]
// = c q^T, outputs o[channel, head] = c^T p^T, with the same box of latents as the first operand,
// straight and transposed. Two warp groups have the same work: scores of 48 heads each, then 256
// channels of the outputs of all 96. Scores of the next tile are made while outputs of this one are
// being finished. As soon as a box has been read for the last time, the one that is RING boxes
// further on is fetched to its place.
//
// Shares of a head are 2^(score - reference), the reference being the highest score of a part's
// first tile; outputs need not be faded from tile to tile. A score that is more than `FAR` above it
// ends the sum: what there is of the part is left in memory, a new sum begins, and is added there.
//
// Python gives QUERY_ROWS, TOKENS, THREADS and SHARED_BYTES (`cuda_decode.py`).

#include "cuda_hopper.cuh"

constexpr int HEADS = QUERY_ROWS, HALF = HEADS / 2, CHANNELS = 512, BOXES = 9;
constexpr int BOX_BYTES = TOKENS * 64 * 2, QUERY_BOX_BYTES = HEADS * 64 * 2;
constexpr int RING = 13;   // boxes of latents that there is memory for
constexpr int AHEAD = 64;  // tiles of which is known at which row of the pool they begin
constexpr float FAR = 64.f;

// Where what lies in shared memory: queries, shares of a tile, the ring, and small things.
constexpr int AT_Q = 0, AT_P = BOXES * QUERY_BOX_BYTES, AT_RING = AT_P + HEADS * TOKENS * 2;
constexpr int AT_REFERENCE = AT_RING + RING * BOX_BYTES, AT_FADED = AT_REFERENCE + HEADS * 4;
constexpr int AT_INVERSE = AT_FADED + HEADS * 4, AT_ROWS = AT_INVERSE + HEADS * 4;
constexpr int FULL = AT_ROWS + 4 * AHEAD, P_EMPTY = FULL + 8 * RING, Q_FULL = P_EMPTY + 8;
static_assert(Q_FULL + 8 <= SHARED_BYTES, "more than a multiprocessor's shared memory");
static_assert(HEADS == 96 && TOKENS == 64 && THREADS == 256, "what the products are written for");

__device__ __forceinline__ u32 base() {
  extern __shared__ __align__(1024) char shared[];
  return static_cast<u32>(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ int tiles_of(int rows) {
  return (max(rows, 0) + TOKENS - 1) / TOKENS;
}

// As the kernel is given them.
struct Context {
  const int* length;
  const int* table;
  int sequences, capacity, query_rows, page_rows, table_stride, page, queries, heads;
};

// Tiles `at` to `last` of the row that all sequences' tiles stand in; `at` is in sequence n, whose
// first tile is `begin`.
struct Share {
  int at, last, n, begin;
};

// Every warp for itself, 32 sequences at a time. The first program also writes for the merge how
// many tiles there are before each sequence.
__device__ Share share_of(const Context& x, int* begins, int teams, int team) {
  int lane = threadIdx.x % 32, total = 0;
  for (int first = 0; first < x.sequences; first += 32) {
    int n = first + lane, tiles = n < x.sequences ? tiles_of(min(x.length[n], x.capacity)) : 0;
    total += __reduce_add_sync(~0u, tiles);
  }
  int quota = (total + teams - 1) / teams, at = min(team * quota, total),
      last = min(at + quota, total);
  int number = 0, begin = 0, before = 0;
  bool writes = blockIdx.x == 0 && threadIdx.x < 32;
  if (writes && lane == 0) begins[0] = 0;
  for (int first = 0; first < x.sequences; first += 32) {
    int n = first + lane, tiles = n < x.sequences ? tiles_of(min(x.length[n], x.capacity)) : 0,
        end = tiles;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      int other = __shfl_up_sync(~0u, end, d);
      if (lane >= d) end += other;
    }
    end += before;
    if (writes && n < x.sequences) begins[n + 1] = end;
    bool passed = n < x.sequences && end <= at;
    number += __popc(__ballot_sync(~0u, passed));
    begin += __reduce_add_sync(~0u, passed ? tiles : 0);
    before = __shfl_sync(~0u, end, 31);
  }
  return {at, last, number, begin};
}

// Where a tile begins in the pool; below zero is no row, of which the copy engine makes zeros.
__device__ __forceinline__ int row_of(const Context& x, int n, int tile) {
  const int* table = x.table + static_cast<long long>(n) * x.table_stride;
  int page = x.page ? table[tile / (x.page / TOKENS)] : table[0];
  int in_page = (x.page ? tile % (x.page / TOKENS) : tile) * TOKENS;
  return page < 0 ? -TOKENS : page * x.page_rows + in_page;
}

// The rows that tiles k to k + 31 of a share begin at.
__device__ __forceinline__ void look_ahead(const Context& x, const Share& share, u32 s, int k) {
  k += threadIdx.x % 32;
  if (k >= share.last - share.at) return;
  int n = share.n, tile = share.at - share.begin + k;
  for (;; n++) {
    int tiles = tiles_of(min(x.length[n], x.capacity));
    if (tile < tiles) break;
    tile -= tiles;
  }
  puti(s + AT_ROWS + 4 * (k % AHEAD), row_of(x, n, tile));
}

// The shared channels first, which scores alone read; then those of either group's outputs in turn.
__device__ __forceinline__ int channel_of(int box) {
  return 64 * (box == 0 ? 8 : (box - 1) / 2 + (box - 1) % 2 * 4);
}

// Read anew from the special register, here and in `thread_of_group`: no register to spare.
__device__ __forceinline__ void part_of(const Context& x, int& team, int& row) {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  team = block / (x.query_rows / HEADS);
  row = block % (x.query_rows / HEADS) * HEADS;
}

// Where in the ring the boxes of a tile lie, one tile after the other.
struct Ring {
  int first = 0, round = 0;
  __device__ __forceinline__ int place(int box) const {
    return first + box - (first + box >= RING ? RING : 0);
  }
  __device__ __forceinline__ int parity(int box) const {
    return (round + (first + box >= RING)) & 1;
  }
  __device__ __forceinline__ int before(int box) const {
    return first + box - BOXES + (first + box < BOXES ? RING : 0);
  }
  __device__ __forceinline__ void next() {
    round += first + BOXES >= RING;
    first = place(BOXES);
  }
};

// One thread's work.
__device__ __forceinline__ void fill(u32 s, const Map* map, int place, int tile, int box,
                                     int tiles) {
  if (tile >= tiles) return;
  u32 bar = s + FULL + 8 * place;
  expect(bar, BOX_BYTES);
  fetch(s + AT_RING + place * BOX_BYTES, map, channel_of(box),
        geti(s + AT_ROWS + 4 * (tile % AHEAD)), bar);
}

// Where a box of tile k was comes the one that is RING boxes behind.
__device__ __forceinline__ void refill(u32 s, const Map* map, int place, int k, int box,
                                       int tiles) {
  fill(s, map, place, k + (box + RING) / BOXES, (box + RING) % BOXES, tiles);
}

__device__ __forceinline__ int thread_of_group() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x % 128;
}

// 64 channels of outputs from a box and the shares of its tile.
__device__ __forceinline__ void mix(float (&o)[48], u32 s, int place, int adds) {
  u32 a = operand(s + AT_RING + place * BOX_BYTES), b = operand(s + AT_P);
#pragma unroll
  for (int step = 0; step < 4; step++)
    multiply<1>(o, a + 128 * step, b + 2 * step, step > 0 ? 1 : adds);
  commit();
}

// Outputs over their sum, to the part's place in memory; `more`: beside what lies there.
__device__ __forceinline__ void leave(float (&o)[4][48], u32 s, float* slot, bool more) {
  int lane = thread_of_group() % 32;
  u32 inverses = s + AT_INVERSE + 8 * (lane % 4), faded_s = s + AT_FADED + 8 * (lane % 4);
  slot += thread_of_group() / 32 * 16 + lane / 4 + 2 * (lane % 4) * CHANNELS;
#pragma unroll
  for (int j = 0; j < 12; j++) {
    float2 inverse = get2(inverses + 32 * j), faded = get2(faded_s + 32 * j);
#pragma unroll
    for (int m = 0; m < 4; m++) {
      float* to = slot + 8 * j * CHANNELS + 64 * m;
      float a = o[m][4 * j] * inverse.x, b = o[m][4 * j + 1] * inverse.y,
            c = o[m][4 * j + 2] * inverse.x, d = o[m][4 * j + 3] * inverse.y;
      if (more) {
        a = fmaf(to[0], faded.x, a);
        b = fmaf(to[CHANNELS], faded.y, b);
        c = fmaf(to[8], faded.x, c);
        d = fmaf(to[CHANNELS + 8], faded.y, d);
      }
      to[0] = a;
      to[CHANNELS] = b;
      to[8] = c;
      to[CHANNELS + 8] = d;
    }
  }
}

__device__ __forceinline__ float* slot_of(const Context& x, float* partial, int n) {
  int team, row;
  part_of(x, team, row);
  return partial + (static_cast<long long>(team + n) * x.query_rows + row) * CHANNELS;
}

// Of the tokens that a warp has.
__device__ __forceinline__ void highest(float& x, float& y) {
#pragma unroll
  for (int d = 4; d < 32; d *= 2) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
    y = fmaxf(y, __shfl_xor_sync(~0u, y, d));
  }
}

// Of half of a tile's shares of a head: threads 2 h and 2 h + 1 have head h of the group's.
__device__ __forceinline__ float half_sum(u32 s, int group) {
  int thread = thread_of_group(), head = group * HALF + thread / 2;
  if (thread >= HEADS) return 0.f;
  float sums[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 a, b, c, d;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(s + AT_P + head * 128 + (((4 * (thread % 2) + i) ^ (head % 8)) * 16))
                 : "memory");
    sums[0] += __uint_as_float(a << 16) + __uint_as_float(a & 0xFFFF0000);
    sums[1] += __uint_as_float(b << 16) + __uint_as_float(b & 0xFFFF0000);
    sums[2] += __uint_as_float(c << 16) + __uint_as_float(c & 0xFFFF0000);
    sums[3] += __uint_as_float(d << 16) + __uint_as_float(d & 0xFFFF0000);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Outputs of tile k have read their m-th box, which lies at `place`.
template <int GROUP>
__device__ __forceinline__ void release(u32 s, const Map* rows, int place, int m, int k,
                                        int tiles) {
  meet<1 + GROUP>();
  if (thread_of_group() == 0) refill(s, rows, place, k, 1 + GROUP + 2 * m, tiles);
}

// Scores of tile k for 48 heads. `HAS_OUTPUTS`: those of the tile before are being made.
template <int GROUP, bool HAS_OUTPUTS>
__device__ __forceinline__ void score(float (&t)[24], u32 s, const Map* rows, const Ring& ring,
                                      int k, int tiles) {
#pragma unroll
  for (int box = 0; box < BOXES; box++) {
    if (HAS_OUTPUTS && box == 1) {
      commit();
      settle<1>();
      release<GROUP>(s, rows, ring.before(7 + GROUP), 3, k - 1, tiles);
      if (thread_of_group() == 0) arrive(s + P_EMPTY);
    }
    int place = ring.place(box);
    wait(s + FULL + 8 * place, ring.parity(box));
    begin_products();
    u32 a = operand(s + AT_RING + place * BOX_BYTES),
        b = operand(s + AT_Q + box * QUERY_BOX_BYTES + GROUP * HALF * 128);
#pragma unroll
    for (int step = 0; step < 4; step++)
      multiply<0>(t, a + 2 * step, b + 2 * step, box > 0 || step > 0);
  }
  commit();
}

// Group g has the scores of heads 48 g to 48 g + 47 and the outputs' channels 256 g to 256 g + 255.
template <int GROUP>
__device__ __forceinline__ void attend_as(const Context& x, Share share, const Map* queries,
                                          const Map* rows, float* partial, float* lse,
                                          float scale) {
  constexpr int MINE = 1 + GROUP;
  u32 s = base();
  int tiles = uniform(share.last - share.at), n = uniform(share.n),
      tile = uniform(share.at - share.begin), odd = 0, k = 0;
  float o[4][48], t[24];
  Ring ring;
  bool more = false;
  int left = 0, seen = 0, last = 0;
  float kept = 0.f;
  while (k < tiles) {
    if (!more) {
      // The first tile of a part. Of this tile and those behind it: rows of the sequence, and rows
      // that the queries see.
      int team, row;
      part_of(x, team, row);
      for (;; n++, tile = 0) {
        left = uniform(min(x.length[n], x.capacity) - tile * TOKENS);
        if (left > 0) break;
      }
      seen = min(x.length[n] - (x.queries - 1) + row / x.heads - tile * TOKENS, left);
      last = min(tiles, k + (left + TOKENS - 1) / TOKENS) - 1;
      if (GROUP == 0 && thread_of_group() == 0) {
        expect(s + Q_FULL, BOXES * QUERY_BOX_BYTES);
        for (int box = 0; box < BOXES; box++)
          fetch(s + AT_Q + box * QUERY_BOX_BYTES, queries, channel_of(box), n * x.query_rows + row,
                s + Q_FULL);
      }
      wait(s + Q_FULL, odd);
    }
    if (thread_of_group() < HALF)
      put(s + AT_REFERENCE + 4 * (HALF * GROUP + thread_of_group()), 0.f);
    meet<MINE>();
    float total = 0.f;
    bool first = true, fresh = true, far;
    score<GROUP, false>(t, s, rows, ring, k, tiles);
    settle<0>();
    keep(t);
    for (;;) {
      // A hole in the table: nothing of it is seen.
      int here = geti(s + AT_ROWS + 4 * (k % AHEAD)) < 0 ? 0 : seen;
      {
        u32 from = s + AT_REFERENCE + 4 * HALF * GROUP + 8 * (thread_of_group() % 4);
#pragma unroll
        for (int j = 0; j < 6; j++) {
          float2 m = get2(from + 32 * j);
          t[4 * j] = fmaf(t[4 * j], scale, -m.x);
          t[4 * j + 1] = fmaf(t[4 * j + 1], scale, -m.y);
          t[4 * j + 2] = fmaf(t[4 * j + 2], scale, -m.x);
          t[4 * j + 3] = fmaf(t[4 * j + 3], scale, -m.y);
        }
      }
      if (here < TOKENS) {
        int thread = thread_of_group(), token = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
        for (int j = 0; j < 12; j++) {
          if (token >= here) t[j / 2 * 4 + j % 2] = minus_infinity();
          if (token + 8 >= here) t[j / 2 * 4 + 2 + j % 2] = minus_infinity();
        }
      }
      bool sets = fresh && here > 0;
      if (sets) {
        // The highest scores of the first tile are what later ones are taken relative to.
        int thread = thread_of_group(), lane = thread % 32;
        // Where the group's shares will lie: [4][48] by warp.
        u32 tops_s = s + AT_P + GROUP * HALF * 128, tops = tops_s + 8 * (lane % 4);
#pragma unroll
        for (int j = 0; j < 6; j++) {
          float a = fmaxf(t[4 * j], t[4 * j + 2]), b = fmaxf(t[4 * j + 1], t[4 * j + 3]);
          highest(a, b);
          if (lane < 4) {
            put(tops + thread / 32 * HALF * 4 + 32 * j, a);
            put(tops + thread / 32 * HALF * 4 + 32 * j + 4, b);
          }
        }
        meet<MINE>();
        if (thread < HALF) {
          u32 at = s + 4 * (HALF * GROUP + thread);
          float a = get(tops_s + 4 * thread);
          for (int w = 1; w < 4; w++) a = fmaxf(a, get(tops_s + 4 * (w * HALF + thread)));
          put(at + AT_REFERENCE, a);
          put(tops_s + 4 * thread, a);
        }
        meet<MINE>();
#pragma unroll
        for (int j = 0; j < 6; j++) {
          float2 a = get2(tops + 32 * j);
          t[4 * j] -= a.x;
          t[4 * j + 1] -= a.y;
          t[4 * j + 2] -= a.x;
          t[4 * j + 3] -= a.y;
        }
        meet<MINE>();
      }
      float tops[4] = {t[0], t[1], t[2], t[3]};
#pragma unroll
      for (int j = 4; j < 24; j++) tops[j % 4] = fmaxf(tops[j % 4], t[j]);
      fresh = fresh && !sets;
      {
        int thread = thread_of_group(), lane = thread % 32;
        u32 to = s + AT_P + (HALF * GROUP + 8 * (lane / 16) + lane % 8) * 128 +
                 (((thread / 32 * 2 + lane / 8 % 2) ^ (lane % 8)) * 16);
#pragma unroll
        for (int j = 0; j < 6; j += 2) {
          asm volatile(
              "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                  to + 1024 * j),
              "r"(pair(exp2_(t[4 * j]), exp2_(t[4 * j + 1]))),
              "r"(pair(exp2_(t[4 * j + 2]), exp2_(t[4 * j + 3]))),
              "r"(pair(exp2_(t[4 * j + 4]), exp2_(t[4 * j + 5]))),
              "r"(pair(exp2_(t[4 * j + 6]), exp2_(t[4 * j + 7])))
              : "memory");
        }
      }
      if (left < TOKENS) {
        // NaN may lie behind the last row, which no share of zero outweighs.
        for (int box = 1 + GROUP; box < BOXES; box += 2) {
          u32 to = s + AT_RING + ring.place(box) * BOX_BYTES + left * 128;
          for (int j = thread_of_group(); j < (TOKENS - left) * 8; j += 128)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to + 16 * j), "r"(0)
                         : "memory");
        }
      }
      publish();
      // Too far above: what there is ends here, and a new sum begins with this tile.
      far = anybody(fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3])) > FAR);
      if (far) break;
      if (GROUP == 0 && thread_of_group() == 0) refill(s, rows, ring.place(0), k, 0, tiles);
      begin_products();
      mix(o[0], s, ring.place(1 + GROUP), !first);
      mix(o[1], s, ring.place(3 + GROUP), !first);
      // Groups in turn: the other one's products go on.
      if (GROUP == 0) total += half_sum(s, GROUP);
      settle<1>();
      release<GROUP>(s, rows, ring.place(1 + GROUP), 0, k, tiles);
      begin_products();
      mix(o[2], s, ring.place(5 + GROUP), !first);
      settle<1>();
      release<GROUP>(s, rows, ring.place(3 + GROUP), 1, k, tiles);
      begin_products();
      mix(o[3], s, ring.place(7 + GROUP), !first);
      if (GROUP == 1) total += half_sum(s, GROUP);
      settle<1>();
      release<GROUP>(s, rows, ring.place(5 + GROUP), 2, k, tiles);
      if (GROUP == 0 && threadIdx.x < 32 && k % 32 == 0 && k > 0) look_ahead(x, share, s, k + 32);
      if (k == last) break;
      first = false;
      left -= TOKENS;
      seen -= TOKENS;
      k++;
      ring.next();
      score<GROUP, true>(t, s, rows, ring, k, tiles);
      wait(s + P_EMPTY, (k & 1) ^ 1);
      settle<0>();
      keep(t);
#pragma unroll
      for (int m = 0; m < 4; m++) keep(o[m]);
    }
    int thread = thread_of_group(), team, row;
    part_of(x, team, row);
    total += __shfl_xor_sync(~0u, total, 1);
    if (thread < HEADS) {
      u32 at = s + 4 * (HALF * GROUP + thread / 2);
      float own = get(at + AT_REFERENCE) + log2_(total), inverse = total > 0.f ? 1.f / total : 0.f,
            faded = 0.f;
      if (more) {
        float top = fmaxf(fmaxf(own, kept), -3e38f), a = exp2_(own - top), b = exp2_(kept - top),
              sum = a + b;
        inverse *= sum > 0.f ? a / sum : 0.f;
        faded = sum > 0.f ? b / sum : 0.f;
        own = top + log2_(sum);
      }
      kept = own;
      if (thread % 2 == 0) {
        put(at + AT_INVERSE, inverse);
        put(at + AT_FADED, faded);
        lse[static_cast<long long>(team + n) * x.query_rows + row + HALF * GROUP + thread / 2] =
            own;
      }
    }
    settle<0>();
    __syncthreads();
    if (!far && thread == 0) {
      arrive(s + P_EMPTY);
      refill(s, rows, ring.place(7 + GROUP), k, 7 + GROUP, tiles);
    }
    leave(o, s, slot_of(x, partial, n) + 256 * GROUP, more);
    // What outputs are divided by is written anew.
    __syncthreads();
    more = far;
    if (!far) {
      k++;
      ring.next();
      n++;
      tile = 0;
      odd ^= 1;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend(const __grid_constant__ Map queries, const __grid_constant__ Map rows, const int* table,
           const int* length, int* begins, float* partial, float* lse, int sequences, int capacity,
           int teams, int query_rows, int page_rows, int table_stride, int page, int num_queries,
           int heads, float scale) {
  u32 s = base();
  Context x{length,    table,        sequences, capacity,    query_rows,
            page_rows, table_stride, page,      num_queries, heads};
  Share share = share_of(x, begins, teams, blockIdx.x / (query_rows / HEADS));
  if (threadIdx.x == 0) {
    for (int i = 0; i < RING; i++) init(s + FULL + 8 * i, 1);
    init(s + P_EMPTY, 2);
    init(s + Q_FULL, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    publish();
  }
  if (threadIdx.x < AHEAD) look_ahead(x, share, s, threadIdx.x / 32 * 32);
  __syncthreads();
  if (threadIdx.x == 0)
    for (int i = 0; i < RING; i++) fill(s, &rows, i, i / BOXES, i % BOXES, share.last - share.at);
  if (uniform(threadIdx.x / 128) == 0)
    attend_as<0>(x, share, &queries, &rows, partial, lse, scale);
  else
    attend_as<1>(x, share, &queries, &rows, partial, lse, scale);
}
