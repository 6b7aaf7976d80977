// Ragged self-attention for compute capability 9.0, after FlashAttention-3 (Shah et al. 2024).
//
// Persistent blocks of one producer warpgroup and CONSUMERS consumer warpgroups. A tile is 64 x CONSUMERS queries of one
// head of one segment; a consumer owns 64 of its rows. The producer copies Q once a tile and K, V in blocks of KEYS rows
// through a ring in shared memory; consumers multiply with wgmma and run the softmax of one block while the tensor cores
// work on P V of the block before. The segment's last block, when partly filled, comes first, on its own and only as wide
// as it must be: all other blocks need no mask.
//
// Copies are 16-byte cp.async, which fill rows beyond the segment with zeros and suit rows of 144 bytes (heads of 72), where
// a tensor map would need 128-byte boxes and a rest. Shared layout: wgmma's unswizzled core matrices, "chunk-major": chunk c (8
// columns, 16 bytes) of row r lies at c x STRIDE + r x 16. STRIDE is an odd number of 16 bytes, so no bank conflicts.
//
// Compiled by nvrtc.py with HEAD_WIDTH, CONSUMERS, KEYS, STAGES, CONSUMER_REGISTERS, PRODUCER_REGISTERS and ELEMENT_*
// defined, behind the wgmma wrappers that hopper_attention.py writes:
//   qk_<N>_first(float* d, u64 a, u64 b)   d[64 x N]  = A B^T, both in shared memory
//   qk_<N>(float* d, u64 a, u64 b)         d[64 x N] += A B^T
//   pv(float* d, const u32* a, u64 b)      d[64 x HEAD_WIDTH] += A B, A in registers

constexpr int CHUNKS = HEAD_WIDTH / 8;
constexpr int QK_STEPS = (CHUNKS + 1) / 2;  // 16 columns of Q and K each
constexpr int QK_CHUNKS = 2 * QK_STEPS;     // an odd CHUNKS is followed by a chunk of zeros
constexpr int TILE = 64 * CONSUMERS;
constexpr int PRODUCERS = 128;
constexpr int Q_STRIDE = 64 * 16 + 16, KV_STRIDE = KEYS * 16 + 16;
constexpr int Q_BYTES = QK_CHUNKS * Q_STRIDE;  // of one consumer
constexpr int K_BYTES = QK_CHUNKS * KV_STRIDE, V_BYTES = CHUNKS * KV_STRIDE;
constexpr int Q_AT = 1024, KV_AT = Q_AT + 2 * CONSUMERS * Q_BYTES;
constexpr int GROUP = 128;  // bytes between two groups of eight rows

struct Tile {
    int begin, length, head, first;  // the segment's first row and length, the head, the tile's first row in the segment
};

// A walk over the tiles in rising order; all lanes of a warp hold the same.
struct Finder {
    int window = 0, tiles_before = 0;  // first segment of the 32 in view, and the tiles before it
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_arrive_after_copies(u32 bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
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
// `leading` and `stride` as wgmma names them: for K-major operands the step to the next 8 columns and the next 8 rows, for
// MN-major ones (V) the step to the next 8 rows and the next 8 columns.
__device__ __forceinline__ u64 descriptor(u32 address, int leading, int stride) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32;
}
// 16 bytes to shared memory, zeros unless `keep`.
__device__ __forceinline__ void copy_16(u32 to, const char* from, bool keep) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(keep ? 16 : 0));
}

// Segments come one after another; in each first the full tiles, head by head, then every head's partly filled one.
__device__ __forceinline__ bool find(Finder& at, int tile, const int* cu, int num_segments, int num_heads, Tile& found) {
    const int lane = threadIdx.x & 31;
    for (; at.window < num_segments; at.window += 32) {
        const int segment = min(at.window + lane, num_segments - 1);
        const int begin = cu[segment];
        const int length = at.window + lane < num_segments ? cu[segment + 1] - begin : 0;
        const int tiles = (length + TILE - 1) / TILE * num_heads;
        int ends = tiles;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(~0u, ends, step);
            if (lane >= step) ends += before;
        }
        const int total = __shfl_sync(~0u, ends, 31);
        if (tile < at.tiles_before + total) {
            const int owner = __ffs(__ballot_sync(~0u, at.tiles_before + ends > tile)) - 1;
            const int local = tile - at.tiles_before - __shfl_sync(~0u, ends - tiles, owner);
            found.begin = __shfl_sync(~0u, begin, owner);
            found.length = __shfl_sync(~0u, length, owner);
            const int full = found.length / TILE;
            if (local < full * num_heads) {
                found.head = local / full;
                found.first = (local - found.head * full) * TILE;
            } else {
                found.head = local - full * num_heads;
                found.first = full * TILE;
            }
            return true;
        }
        at.tiles_before += total;
    }
    return false;
}

// The producer threads copy rows of one head together: ROWS_A_PASS at a time, each thread always the same chunk of them, so
// that a copy costs an addition or two. (Threads beyond the last whole row have no part.)
struct Copier {
    static constexpr int ROWS_A_PASS = PRODUCERS / CHUNKS;
    int row, at;          // this thread's row of the first pass, and where it begins in memory
    int chunk;
    long pass_bytes;

    __device__ __forceinline__ Copier(int thread, long row_bytes) {
        row = thread / CHUNKS, chunk = thread - row * CHUNKS;
        at = row * (int)row_bytes + chunk * 16;
        pass_bytes = ROWS_A_PASS * row_bytes;
        if (row >= ROWS_A_PASS) row = 1 << 20;
    }

    // Rows [0, ROWS), those from `valid` on as zeros.
    template <int ROWS, int STRIDE> __device__ __forceinline__ void copy(u32 to, const char* from, int valid) const {
        const char* source = from + at;
        to += chunk * STRIDE + row * 16;
        if (valid >= ROWS) {
#pragma unroll
            for (int first = 0; first < ROWS; first += ROWS_A_PASS, source += pass_bytes)
                if (row < ROWS - first) copy_16(to + first * 16, source, true);
        } else {
#pragma unroll 1
            for (int first = 0; first < ROWS; first += ROWS_A_PASS, source += pass_bytes, to += ROWS_A_PASS * 16)
                if (row < ROWS - first) copy_16(to, row < valid - first ? source : from, row < valid - first);
        }
    }
};

struct Softmax {
    float peak[2], total[2], fade[2];  // of this thread's two rows; `total` is summed over the four lanes at the end

    // Scores to weights, in place; `scale` includes log2(e).
    template <int N, int SIZE> __device__ __forceinline__ void step(float (&s)[SIZE], float scale) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float top = peak[r];
#pragma unroll
            for (int i = 0; i < N / 8; ++i) top = fmaxf(top, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            const float shift = top * scale;
            fade[r] = exp2_fast(peak[r] * scale - shift);
            peak[r] = top;
            float sum0 = 0.f, sum1 = 0.f;
#pragma unroll
            for (int i = 0; i < N / 8; ++i) {
                sum0 += s[4 * i + 2 * r] = exp2_fast(s[4 * i + 2 * r] * scale - shift);
                sum1 += s[4 * i + 2 * r + 1] = exp2_fast(s[4 * i + 2 * r + 1] * scale - shift);
            }
            total[r] = total[r] * fade[r] + (sum0 + sum1);
        }
    }
};

template <int N> __device__ __forceinline__ void multiply_qk(float* s, u32 q, u32 k) {
#pragma unroll
    for (int i = 0; i < QK_STEPS; ++i) {
        const u64 a = descriptor(q + 2 * i * Q_STRIDE, Q_STRIDE, GROUP), b = descriptor(k + 2 * i * KV_STRIDE, KV_STRIDE, GROUP);
        if constexpr (N == 16) i ? qk_16(s, a, b) : qk_16_first(s, a, b);
        if constexpr (N == 32) i ? qk_32(s, a, b) : qk_32_first(s, a, b);
        if constexpr (N == 64) i ? qk_64(s, a, b) : qk_64_first(s, a, b);
        if constexpr (N == KEYS && KEYS > 64) i ? QK_KEYS(s, a, b) : QK_KEYS_FIRST(s, a, b);
    }
}

template <int N> __device__ __forceinline__ void multiply_pv(float* o, const u32* p, u32 v) {
#pragma unroll
    for (int i = 0; i < N / 16; ++i) pv(o, p + 4 * i, descriptor(v + 2 * i * GROUP, GROUP, KV_STRIDE));
}

template <int N> __device__ __forceinline__ void to_operand(u32* p, const float* s) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
}

template <int N> __device__ __forceinline__ void fade_rows(float (&o)[N], const float* fade) {
#pragma unroll
    for (int i = 0; i < N; ++i) o[i] *= fade[i / 2 % 2];
}

// The partly filled block: N columns, `valid` of them keys.
template <int N, int O>
__device__ __forceinline__ void attend_rest(float (&o)[O], Softmax& softmax, u32 q, u32 k, u32 v, int valid, float scale) {
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

extern "C" __global__ void __launch_bounds__(PRODUCERS + 128 * CONSUMERS, 1) ragged_attention(
    const char* __restrict__ qkv, const int* __restrict__ cu, char* __restrict__ out, int num_segments, int num_heads,
    float scale) {
    extern __shared__ __align__(1024) char shared[];
    const u32 base = shared_address(shared);
    const u32 q_full = base, q_free = base + 16, k_full = base + 64, v_full = k_full + 8 * STAGES, kv_free = v_full + 8 * STAGES;
    const long row_bytes = 6l * num_heads * HEAD_WIDTH, out_row_bytes = 2l * num_heads * HEAD_WIDTH;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);

    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) barrier_init(q_full + 8 * i, PRODUCERS), barrier_init(q_free + 8 * i, 4 * CONSUMERS);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(k_full + 8 * i, PRODUCERS), barrier_init(v_full + 8 * i, PRODUCERS);
            barrier_init(kv_free + 8 * i, 4 * CONSUMERS);
        }
    }
    if constexpr (CHUNKS % 2) {  // the chunk of zeros behind Q's and K's columns
        const int4 zero = {0, 0, 0, 0};
        for (int i = threadIdx.x; i < 2 * CONSUMERS * 64; i += blockDim.x)
            *(int4*)(shared + Q_AT + i / 64 * Q_BYTES + CHUNKS * Q_STRIDE + i % 64 * 16) = zero;
        for (int i = threadIdx.x; i < STAGES * KEYS; i += blockDim.x)
            *(int4*)(shared + KV_AT + i / KEYS * (K_BYTES + V_BYTES) + CHUNKS * KV_STRIDE + i % KEYS * 16) = zero;
    }
    fence_async_proxy();
    __syncthreads();

    Finder finder;
    Tile tile;
    Ring ring;
    if (warpgroup == 0) {  // the producer
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        const Copier copier(threadIdx.x, row_bytes);
        for (int n = 0; find(finder, blockIdx.x + n * gridDim.x, cu, num_segments, num_heads, tile); ++n) {
            const char* segment = qkv + tile.begin * row_bytes + tile.head * (2 * HEAD_WIDTH);
            const u32 q = base + Q_AT + (n & 1) * (CONSUMERS * Q_BYTES);
            barrier_wait(q_free + 8 * (n & 1), (n >> 1 & 1) ^ 1);
#pragma unroll 1
            for (int i = 0; i < CONSUMERS; ++i) {
                const int first = tile.first + 64 * i;
                if (first < tile.length)
                    copier.copy<64, Q_STRIDE>(q + i * Q_BYTES, segment + first * row_bytes, tile.length - first);
            }
            barrier_arrive_after_copies(q_full + 8 * (n & 1));
            const int full = tile.length / KEYS, rest = tile.length - full * KEYS;
#pragma unroll 1
            for (int j = rest ? -1 : 0; j < full; ++j, ring.next()) {
                const int valid = j < 0 ? rest : KEYS;
                const char* k = segment + out_row_bytes + (j < 0 ? full : j) * KEYS * row_bytes;
                const u32 to = base + KV_AT + ring.stage * (K_BYTES + V_BYTES);
                barrier_wait(kv_free + 8 * ring.stage, ring.parity ^ 1);
                copier.copy<KEYS, KV_STRIDE>(to, k, valid);
                barrier_arrive_after_copies(k_full + 8 * ring.stage);
                copier.copy<KEYS, KV_STRIDE>(to + K_BYTES, k + out_row_bytes, valid);
                barrier_arrive_after_copies(v_full + 8 * ring.stage);
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    const int consumer = warpgroup - 1, lane = threadIdx.x & 31, warp = threadIdx.x / 32 & 3;
    for (int n = 0; find(finder, blockIdx.x + n * gridDim.x, cu, num_segments, num_heads, tile); ++n) {
        const int full = tile.length / KEYS, rest = tile.length - full * KEYS;
        const int first = tile.first + 64 * consumer;
        const u32 q = base + Q_AT + ((n & 1) * CONSUMERS + consumer) * Q_BYTES;
        if (first >= tile.length) {  // no rows for this consumer: only keep the ring turning
#pragma unroll 1
            for (int j = rest ? -1 : 0; j < full; ++j, ring.next()) {
                barrier_wait(v_full + 8 * ring.stage, ring.parity);
                if (lane == 0) barrier_arrive(kv_free + 8 * ring.stage);
            }
            barrier_wait(q_full + 8 * (n & 1), n >> 1 & 1);
            if (lane == 0) barrier_arrive(q_free + 8 * (n & 1));
            continue;
        }
        float o[HEAD_WIDTH / 2];
        Softmax softmax;
#pragma unroll
        for (int r = 0; r < 2; ++r) softmax.peak[r] = -INFINITY_F, softmax.total[r] = 0.f;
#pragma unroll
        for (int i = 0; i < HEAD_WIDTH / 2; ++i) o[i] = 0.f;
        barrier_wait(q_full + 8 * (n & 1), n >> 1 & 1);

        if (rest) {
            const u32 k = base + KV_AT + ring.stage * (K_BYTES + V_BYTES), v = k + K_BYTES;
            barrier_wait(k_full + 8 * ring.stage, ring.parity);
            barrier_wait(v_full + 8 * ring.stage, ring.parity);
            fence_async_proxy();
            if (rest <= 16) attend_rest<16>(o, softmax, q, k, v, rest, scale);
            else if (rest <= 32) attend_rest<32>(o, softmax, q, k, v, rest, scale);
            else if (rest <= 64) attend_rest<64>(o, softmax, q, k, v, rest, scale);
            else attend_rest<KEYS>(o, softmax, q, k, v, rest, scale);
            if (lane == 0) barrier_arrive(kv_free + 8 * ring.stage);
            ring.next();
        }
        if (full) {
            float s[KEYS / 2];
            u32 p[KEYS / 4];
            u32 k = base + KV_AT + ring.stage * (K_BYTES + V_BYTES);
            barrier_wait(k_full + 8 * ring.stage, ring.parity);
            fence_async_proxy();
            wgmma_fence();
            multiply_qk<KEYS>(s, q, k);
            wgmma_commit();
            wgmma_wait<0>();
            pin(s);
            softmax.step<KEYS>(s, scale);
            fade_rows(o, softmax.fade);
            to_operand<KEYS>(p, s);
#pragma unroll 1
            for (int j = 1; j < full; ++j) {
                const Ring now = ring;
                const u32 v = k + K_BYTES;
                ring.next();
                k = base + KV_AT + ring.stage * (K_BYTES + V_BYTES);
                barrier_wait(k_full + 8 * ring.stage, ring.parity);
                barrier_wait(v_full + 8 * now.stage, now.parity);
                fence_async_proxy();
                pin(o);
                wgmma_fence();
                multiply_qk<KEYS>(s, q, k);
                wgmma_commit();
                multiply_pv<KEYS>(o, p, v);
                wgmma_commit();
                wgmma_wait<1>();
                pin(s);
                softmax.step<KEYS>(s, scale);
                // ptxas would hoist the wait above the exponentials, which belong beside the tensor cores' work. It does not
                // across a branch that hangs on their sums (never taken, but for NaN).
                if (!(softmax.total[0] + softmax.total[1] >= 0.f)) asm volatile("nanosleep.u32 0;" ::: "memory");
                wgmma_wait<0>();
                pin(o);
                if (lane == 0) barrier_arrive(kv_free + 8 * now.stage);
                fade_rows(o, softmax.fade);
                to_operand<KEYS>(p, s);
            }
            barrier_wait(v_full + 8 * ring.stage, ring.parity);
            fence_async_proxy();
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
        char* staged = shared + (q - base) + warp * 256;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float total = softmax.total[r];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            const float inverse = 1.f / total;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
                *(u32*)(staged + c * Q_STRIDE + (lane / 4 + 8 * r) * 16 + lane % 4 * 4) =
                    pack(o[4 * c + 2 * r] * inverse, o[4 * c + 2 * r + 1] * inverse);
        }
        __syncwarp();
        char* to = out + (tile.begin + first + warp * 16) * out_row_bytes + tile.head * (2 * HEAD_WIDTH);
#pragma unroll
        for (int i = lane; i < 16 * CHUNKS; i += 32) {
            const int row = i / CHUNKS, chunk = i - row * CHUNKS;
            if (first + warp * 16 + row < tile.length)
                *(int4*)(to + row * out_row_bytes + chunk * 16) = *(const int4*)(staged + chunk * Q_STRIDE + row * 16);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(q_free + 8 * (n & 1));
    }
}
