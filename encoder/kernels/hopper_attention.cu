// Ragged self-attention for compute capability 9.0, after FlashAttention-3 (Shah et al. 2024).
//
// Persistent blocks of one producer warp and CONSUMERS consumer warpgroups. A tile is 64 x CONSUMERS queries of one head of one
// segment; a consumer owns 64 of its rows. The producer sends Q once a tile and K, V in blocks of KEYS rows through a ring in
// shared memory, all by the bulk tensor copy engine: copies by threads share a queue with the consumers' shuffles and
// barriers, and stalled them. Consumers take turns at the tensor cores, the others being at their softmax meanwhile (within
// 2 % of leaving them to themselves). The segment's last block, when partly filled, comes first, on its own and only as wide as it
// must be: all other blocks need no mask.
//
// A head of 72 columns is 64 + 8 for the copy engine: a box of 64 columns (128-byte swizzle) and a rest as wide as a power of
// two (16 columns, 32-byte swizzle), filled with zeros beyond the head by the tensor map. V's rest lies in a second box of
// 64, so that one wgmma of N = 72 spans both.
//
// With OUT_BYTES = 1 it gives e4m3: (out - mean) * factor, `mean` having one number a column.
//
// Compiled by nvrtc.py with HEAD_WIDTH, CONSUMERS, KEYS, STAGES, CONSUMER_REGISTERS, PRODUCER_REGISTERS, MAIN_WIDTH, REST_WIDTH,
// OUT_BYTES and ELEMENT_* defined, behind the wgmma wrappers that hopper_attention.py writes:
//   qk_<N>_first(float* d, u64 a, u64 b)   d[64 x N]  = A B^T, both in shared memory
//   qk_<N>(float* d, u64 a, u64 b)         d[64 x N] += A B^T
//   pv(float* d, const u32* a, u64 b)      d[64 x HEAD_WIDTH] += A B, A in registers

constexpr int TILE = 64 * CONSUMERS;
constexpr int CHUNKS = HEAD_WIDTH / 8, CHUNK_BYTES = 8 * OUT_BYTES;
constexpr int MAIN_STEPS = ((HEAD_WIDTH < 64 ? HEAD_WIDTH : 64) + 15) / 16, REST_STEPS = (HEAD_WIDTH - 64 + 15) / 16;
constexpr int MAIN_ROW = 2 * MAIN_WIDTH, REST_ROW = 2 * REST_WIDTH, V_ROW = 128;  // bytes in shared memory
constexpr int V_ATOMS = (HEAD_WIDTH + 63) / 64;
constexpr int BOX_ROWS = 64;
constexpr int Q_BYTES = 64 * (MAIN_ROW + REST_ROW);  // of one consumer
constexpr int K_BYTES = KEYS * (MAIN_ROW + REST_ROW), V_BYTES = V_ATOMS * KEYS * V_ROW;
constexpr int TILE_AT = 512, Q_AT = 1024, KV_AT = Q_AT + 2 * CONSUMERS * Q_BYTES;

struct alignas(64) TensorMap {
    u64 opaque[16];
};

struct alignas(16) Tile {
    int begin, length, head, first;  // the segment's first row and length (-1: no tile), the head, the tile's first row in the segment
};

// A block's walk over its tiles, by the producer's warp, whose lanes all hold the same. First come all full tiles, dealt out in turn, then the partly
// filled ones, which take less time: the blocks that were dealt one full tile less take two of them before anyone else.
struct Walk {
    int next = blockIdx.x;             // tile of its kind
    int window = 0, tiles_before = 0;  // first segment of the 32 in view, and the tiles of this kind before it
    int light = 0;                     // among full tiles 0, then the number of blocks with one full tile less
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    } while (!done);
}
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from touching accumulators while wgmma still writes them.
template <int N> __device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 pair;
    asm("cvt.rn." ELEMENT_PTX "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ unsigned short pack_e4m3(float low, float high) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
template <int BYTES> struct ChunkOf { using type = int4; };
template <> struct ChunkOf<8> { using type = int2; };
using Chunk = ChunkOf<CHUNK_BYTES>::type;
// A turn at the tensor cores: named barriers, one a consumer, that the consumer before it opens.
__device__ __forceinline__ void await_turn(int consumer) {
    asm volatile("bar.sync %0, 256;" ::"r"(8 + consumer) : "memory");
}
__device__ __forceinline__ void pass_turn(int consumer) {
    asm volatile("bar.arrive %0, 256;" ::"r"(8 + (consumer + 1) % CONSUMERS) : "memory");
}
// wgmma's view of shared memory. `row` is the length of a row in bytes and names the swizzle; `leading` is read for V alone: the
// step from one box of 64 columns to the next.
template <int ROW> __device__ __forceinline__ u64 descriptor(u32 address, int leading = 16) {
    constexpr u32 swizzle = ROW == 128 ? 1 : ROW == 64 ? 2 : 3;
    const u32 low = address >> 4 | leading >> 4 << 16, high = 8 * ROW >> 4 | swizzle << 30;
    return low | (u64)high << 32;
}
// One box of BOX_ROWS rows: column `column` on, of head `head` (3 x heads of them: q, k, v), from row `row` on.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, int column, int head, int row, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(&map), "r"(column), "r"(head), "r"(row), "r"(bar)
        : "memory");
}

// Tile `next` of its kind: segments come one after another, in each the heads.
__device__ __forceinline__ bool find(Walk& at, const int* cu, int num_segments, int num_heads, Tile& found) {
    const int lane = threadIdx.x & 31;
    for (; at.window < num_segments; at.window += 32) {
        const int segment = min(at.window + lane, num_segments - 1);
        const int begin = cu[segment];
        const int length = at.window + lane < num_segments ? cu[segment + 1] - begin : 0;
        const int tiles = (at.light == 0 ? length / TILE : length % TILE != 0) * num_heads;
        int ends = tiles;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(~0u, ends, step);
            if (lane >= step) ends += before;
        }
        const int total = __shfl_sync(~0u, ends, 31);
        if (at.next < at.tiles_before + total) {
            const int owner = __ffs(__ballot_sync(~0u, at.tiles_before + ends > at.next)) - 1;
            const int local = at.next - at.tiles_before - __shfl_sync(~0u, ends - tiles, owner);
            found.begin = __shfl_sync(~0u, begin, owner);
            found.length = __shfl_sync(~0u, length, owner);
            const int full = found.length / TILE;
            found.head = at.light == 0 ? local / full : local;
            found.first = (at.light == 0 ? local - found.head * full : full) * TILE;
            return true;
        }
        at.tiles_before += total;
    }
    return false;
}

__device__ __forceinline__ bool next_tile(Walk& at, const int* cu, int num_segments, int num_heads, Tile& found) {
    bool any = find(at, cu, num_segments, num_heads, found);
    if (!any && at.light == 0) {
        const int block = blockIdx.x, heavy = at.tiles_before % gridDim.x;
        at.light = gridDim.x - heavy;
        at.window = at.tiles_before = 0;
        at.next = block < heavy ? 2 * at.light + block : block - heavy;
        any = find(at, cu, num_segments, num_heads, found);
    }
    at.next += at.next < at.light ? at.light : gridDim.x;  // a light block's first, its second, then all in turn
    return any;
}

// `boxes` of Q or K: the main columns, then, behind ROWS of those, the rest.
template <int ROWS>
__device__ __forceinline__ void copy_rows(
    u32 to, const TensorMap& main_map, const TensorMap& rest_map, int head, int row, int boxes, u32 bar) {
#pragma unroll 1
    for (int i = 0; i < boxes * BOX_ROWS; i += BOX_ROWS) {
        copy_box(to + i * MAIN_ROW, main_map, 0, head, row + i, bar);
        if constexpr (REST_WIDTH > 0) copy_box(to + ROWS * MAIN_ROW + i * REST_ROW, rest_map, 64, head, row + i, bar);
    }
}

// Online softmax of a thread's two rows. `peak` follows the largest score only when that has grown by more than 8 powers of
// two: until then weights may reach 256, which costs no precision, and output and sums need no rescaling.
struct Softmax {
    float peak[2] = {-INFINITY_F, -INFINITY_F};
    float total[2] = {0.f, 0.f};  // of this thread's columns; summed over the four lanes of a row at the end
    float fade[2] = {1.f, 1.f};   // what output and sums so far are to be multiplied by
    bool fades = false;           // whether any row of the warp fades

    // Scores to weights, in place; `scale` includes log2(e).
    template <int N> __device__ __forceinline__ void step(float* s, float scale) {
        float top[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
        for (int i = 4; i < N / 2; ++i) top[i % 4] = fmaxf(top[i % 4], s[i]);
        float shift[2], sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            top[r] = fmaxf(top[2 * r], top[2 * r + 1]);
            top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
        }
        const bool grows[2] = {(top[0] - peak[0]) * scale > 8.f, (top[1] - peak[1]) * scale > 8.f};
        fades = __any_sync(~0u, grows[0] || grows[1]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float next = grows[r] ? top[r] : peak[r];
            shift[r] = next * scale;
            fade[r] = grows[r] ? exp2_fast(peak[r] * scale - shift[r]) : 1.f;
            peak[r] = next;
        }
#pragma unroll
        for (int i = 0; i < N / 2; ++i) sum[i % 4] += s[i] = exp2_fast(s[i] * scale - shift[i / 2 % 2]);
#pragma unroll
        for (int r = 0; r < 2; ++r) total[r] = total[r] * fade[r] + (sum[2 * r] + sum[2 * r + 1]);
    }

    template <int N> __device__ __forceinline__ void fade_rows(float (&o)[N]) const {
        if (!fades) return;
#pragma unroll
        for (int i = 0; i < N; ++i) o[i] *= fade[i / 2 % 2];
    }
};

template <int N> __device__ __forceinline__ void multiply_qk_step(float* s, u64 q, u64 k, bool first) {
    if constexpr (N == 16) first ? qk_16_first(s, q, k) : qk_16(s, q, k);
    if constexpr (N == 32) first ? qk_32_first(s, q, k) : qk_32(s, q, k);
    if constexpr (N == 64) first ? qk_64_first(s, q, k) : qk_64(s, q, k);
    if constexpr (N == 128) first ? qk_128_first(s, q, k) : qk_128(s, q, k);
}

template <int N> __device__ __forceinline__ void multiply_qk(float* s, u32 q, u32 k) {
    const u64 q_main = descriptor<MAIN_ROW>(q), k_main = descriptor<MAIN_ROW>(k);
#pragma unroll
    for (int i = 0; i < MAIN_STEPS; ++i) multiply_qk_step<N>(s, q_main + 2 * i, k_main + 2 * i, i == 0);
    if constexpr (REST_WIDTH > 0) {
        const u64 q_rest = descriptor<REST_ROW>(q + 64 * MAIN_ROW), k_rest = descriptor<REST_ROW>(k + KEYS * MAIN_ROW);
#pragma unroll
        for (int i = 0; i < REST_STEPS; ++i) multiply_qk_step<N>(s, q_rest + 2 * i, k_rest + 2 * i, false);
    }
}

template <int N> __device__ __forceinline__ void multiply_pv(float* o, const u32* p, u32 v) {
    const u64 first = descriptor<V_ROW>(v, KEYS * V_ROW);
#pragma unroll
    for (int i = 0; i < N / 16; ++i) pv(o, p + 4 * i, first + i * (16 * V_ROW >> 4));
}

template <int N> __device__ __forceinline__ void to_operand(u32* p, const float* s) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
}

// The partly filled block: N columns, `valid` of them keys.
template <int N, int O>
__device__ __forceinline__ void attend_rest(
    float (&o)[O], Softmax& softmax, u32 q, u32 k, u32 v, char* v_rows, int valid, float scale, int consumer) {
    // Rows beyond the segment are the next one's, or padding that may hold NaN, which a weight of 0 would not stop. Every
    // consumer writes these zeros for itself: the others' are the same.
    for (int i = threadIdx.x & 127; i < (N - valid) * 8; i += 128) {
#pragma unroll
        for (int atom = 0; atom < V_ATOMS; ++atom)
            *(int4*)(v_rows + atom * KEYS * V_ROW + valid * V_ROW + i * 16) = make_int4(0, 0, 0, 0);
    }
    fence_async_proxy();
    asm volatile("bar.sync %0, 128;" ::"r"(consumer + 1) : "memory");
    float s[N / 2];
    u32 p[N / 4];
    wgmma_fence();
    multiply_qk<N>(s, q, k);
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
    const int column = 2 * (threadIdx.x & 3);
#pragma unroll
    for (int i = 0; i < N / 2; ++i)
        if (i / 4 * 8 + column + i % 2 >= valid) s[i] = -INFINITY_F;
    softmax.step<N>(s, scale);
    to_operand<N>(p, s);
    wgmma_fence();
    multiply_pv<N>(o, p, v);
    wgmma_commit();
    wgmma_wait<0>();
    pin(o);
}

struct Ring {
    int stage = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

extern "C" __global__ void __launch_bounds__(128 + 128 * CONSUMERS, 1) ragged_attention(
    const __grid_constant__ TensorMap main_map, const __grid_constant__ TensorMap rest_map, const __grid_constant__ TensorMap v_map,
    const int* __restrict__ cu, char* __restrict__ out, int num_segments, int num_heads, float scale, const float* __restrict__ mean,
    float factor) {
    extern __shared__ __align__(1024) char shared[];
    const u32 base = shared_address(shared);
    const u32 q_full = base, q_free = base + 16, k_full = base + 64, v_full = k_full + 8 * STAGES, kv_free = v_full + 8 * STAGES;
    Tile* tiles = (Tile*)(shared + TILE_AT);  // handed on with Q
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);

    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) barrier_init(q_full + 8 * i, 1), barrier_init(q_free + 8 * i, 4 * CONSUMERS);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(k_full + 8 * i, 1), barrier_init(v_full + 8 * i, 1);
            barrier_init(kv_free + 8 * i, 4 * CONSUMERS);
        }
        fence_async_proxy();
    }
    __syncthreads();

    Tile tile;
    Ring ring;
    if (warpgroup == 0) {  // the producer: one lane of one warp
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x >= 32) return;
        Walk walk;
        bool any = true;
        for (int n = 0; any; ++n) {
            any = next_tile(walk, cu, num_segments, num_heads, tile);
            if (threadIdx.x == 0) {
                const u32 q = base + Q_AT + (n & 1) * (CONSUMERS * Q_BYTES), q_bar = q_full + 8 * (n & 1);
                if (!any) tile.first = tile.length = -1;
                const int active = min((tile.length - tile.first + 63) / 64, CONSUMERS);
                barrier_wait(q_free + 8 * (n & 1), (n >> 1 & 1) ^ 1);
                tiles[n & 1] = tile;
                barrier_expect(q_bar, active * Q_BYTES);
                if (!any) break;
#pragma unroll 1
                for (int i = 0; i < active; ++i)
                    copy_rows<64>(q + i * Q_BYTES, main_map, rest_map, tile.head, tile.begin + tile.first + 64 * i, 1, q_bar);
                const int full = tile.length / KEYS, rest = tile.length - full * KEYS;
#pragma unroll 1
                for (int j = rest ? -1 : 0; j < full; ++j, ring.next()) {
                    const int row = tile.begin + (j < 0 ? full : j) * KEYS;
                    const u32 k = base + KV_AT + ring.stage * (K_BYTES + V_BYTES), v = k + K_BYTES;
                    barrier_wait(kv_free + 8 * ring.stage, ring.parity ^ 1);
                    const int boxes = j < 0 ? (rest + BOX_ROWS - 1) / BOX_ROWS : KEYS / BOX_ROWS;
                    barrier_expect(k_full + 8 * ring.stage, boxes * (K_BYTES / KEYS * BOX_ROWS));
                    copy_rows<KEYS>(k, main_map, rest_map, num_heads + tile.head, row, boxes, k_full + 8 * ring.stage);
                    barrier_expect(v_full + 8 * ring.stage, boxes * (V_BYTES / KEYS * BOX_ROWS));
                    for (int i = 0; i < boxes * BOX_ROWS; i += BOX_ROWS)
#pragma unroll
                        for (int atom = 0; atom < V_ATOMS; ++atom)
                            copy_box(v + (atom * KEYS + i) * V_ROW, v_map, atom * 64, 2 * num_heads + tile.head, row + i, v_full + 8 * ring.stage);
                }
            }
            __syncwarp();
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    const long out_row_bytes = (long)OUT_BYTES * num_heads * HEAD_WIDTH;
    const int consumer = warpgroup - 1, lane = threadIdx.x & 31, warp = threadIdx.x / 32 & 3;
    if (consumer == CONSUMERS - 1) pass_turn(consumer);  // the first turn is consumer 0's
    for (int n = 0;; ++n) {
        barrier_wait(q_full + 8 * (n & 1), n >> 1 & 1);
        tile = tiles[n & 1];
        if (tile.length < 0) break;
        const int full = tile.length / KEYS, rest = tile.length - full * KEYS;
        const int first = tile.first + 64 * consumer;
        const u32 q = base + Q_AT + ((n & 1) * CONSUMERS + consumer) * Q_BYTES;
        if (first >= tile.length) {  // no rows for this consumer: only keep the ring and the turns going
#pragma unroll 1
            for (int j = rest ? -1 : 0; j < full; ++j, ring.next()) {
                if (j > 0) await_turn(consumer), pass_turn(consumer);
                barrier_wait(v_full + 8 * ring.stage, ring.parity);
                if (lane == 0) barrier_arrive(kv_free + 8 * ring.stage);
            }
            __syncwarp();  // all lanes have read the tile
            if (lane == 0) barrier_arrive(q_free + 8 * (n & 1));
            continue;
        }
        float o[HEAD_WIDTH / 2];
        Softmax softmax;
#pragma unroll
        for (int i = 0; i < HEAD_WIDTH / 2; ++i) o[i] = 0.f;

        if (rest) {
            const u32 k = base + KV_AT + ring.stage * (K_BYTES + V_BYTES), v = k + K_BYTES;
            barrier_wait(k_full + 8 * ring.stage, ring.parity);
            barrier_wait(v_full + 8 * ring.stage, ring.parity);
            char* v_rows = shared + (v - base);
            if (rest <= 16) attend_rest<16>(o, softmax, q, k, v, v_rows, rest, scale, consumer);
            else if (rest <= 32) attend_rest<32>(o, softmax, q, k, v, v_rows, rest, scale, consumer);
            else if (rest <= 64) attend_rest<64>(o, softmax, q, k, v, v_rows, rest, scale, consumer);
            else attend_rest<KEYS>(o, softmax, q, k, v, v_rows, rest, scale, consumer);
            if (lane == 0) barrier_arrive(kv_free + 8 * ring.stage);
            ring.next();
        }
        if (full) {
            float s[KEYS / 2];
            u32 p[KEYS / 4];
            u32 k = base + KV_AT + ring.stage * (K_BYTES + V_BYTES);
            barrier_wait(k_full + 8 * ring.stage, ring.parity);
            wgmma_fence();
            multiply_qk<KEYS>(s, q, k);
            wgmma_commit();
            wgmma_wait<0>();
            pin(s);
            softmax.step<KEYS>(s, scale);
            softmax.fade_rows(o);
            to_operand<KEYS>(p, s);
#pragma unroll 1
            for (int j = 1; j < full; ++j) {
                const Ring now = ring;
                const u32 v = k + K_BYTES;
                ring.next();
                k = base + KV_AT + ring.stage * (K_BYTES + V_BYTES);
                barrier_wait(k_full + 8 * ring.stage, ring.parity);
                barrier_wait(v_full + 8 * now.stage, now.parity);
                await_turn(consumer);
                pin(o);
                wgmma_fence();
                multiply_qk<KEYS>(s, q, k);
                wgmma_commit();
                multiply_pv<KEYS>(o, p, v);
                wgmma_commit();
                pass_turn(consumer);
                wgmma_wait<1>();
                pin(s);
                softmax.step<KEYS>(s, scale);
                // ptxas would hoist the wait above the exponentials, which belong beside the tensor cores' work. It does not
                // across a branch that hangs on their sums (never taken, but for NaN).
                if (!(softmax.total[0] + softmax.total[1] >= 0.f)) asm volatile("nanosleep.u32 0;" ::: "memory");
                wgmma_wait<0>();
                pin(o);
                if (lane == 0) barrier_arrive(kv_free + 8 * now.stage);
                softmax.fade_rows(o);
                to_operand<KEYS>(p, s);
            }
            barrier_wait(v_full + 8 * ring.stage, ring.parity);
            pin(o);
            wgmma_fence();
            multiply_pv<KEYS>(o, p, k + K_BYTES);
            wgmma_commit();
            wgmma_wait<0>();
            pin(o);
            if (lane == 0) barrier_arrive(kv_free + 8 * ring.stage);
            ring.next();
        }

        // Rows leave through this consumer's part of Q, which all four of its warps have finished reading.
        asm volatile("bar.sync %0, 128;" ::"r"(consumer + 1) : "memory");
        char* staged = shared + (q - base) + warp * (16 * CHUNK_BYTES);  // chunk-major: 64 rows of a chunk
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float total = softmax.total[r];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            const float inverse = 1.f / total;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                char* to_pair = staged + c * (64 * CHUNK_BYTES) + (lane / 4 + 8 * r) * CHUNK_BYTES + lane % 4 * (2 * OUT_BYTES);
                const float low = o[4 * c + 2 * r] * inverse, high = o[4 * c + 2 * r + 1] * inverse;
                if constexpr (OUT_BYTES == 1) {
                    const float2 m = __ldg((const float2*)(mean + tile.head * HEAD_WIDTH + 8 * c) + lane % 4);
                    *(unsigned short*)to_pair = pack_e4m3((low - m.x) * factor, (high - m.y) * factor);
                } else {
                    *(u32*)to_pair = pack(low, high);
                }
            }
        }
        __syncwarp();
        char* to = out + (long)(tile.begin + first + warp * 16) * out_row_bytes + tile.head * (OUT_BYTES * HEAD_WIDTH);
#pragma unroll
        for (int i = lane; i < 16 * CHUNKS; i += 32) {
            const int row = i / CHUNKS, chunk = i - row * CHUNKS;
            if (first + warp * 16 + row < tile.length)
                *(Chunk*)(to + row * out_row_bytes + chunk * CHUNK_BYTES) =
                    *(const Chunk*)(staged + chunk * (64 * CHUNK_BYTES) + row * CHUNK_BYTES);
        }
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) barrier_arrive(q_free + 8 * (n & 1));
    }
}
