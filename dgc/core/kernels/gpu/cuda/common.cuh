// What all CUDA sources share: types, tables, conversions, sums over a block.
//
// The sources are joined into one text and compiled at run time, once for float32 state and once for float64
// (STATE_BITS). They use no header, so that the same text also compiles as C++ for a processor, where the tests run it.
// Every sum and product is rounded by itself: compile with --fmad=false, or results differ from the other backends.
//
// n elements of a bucket's flat space, S segments, k entries. A key is the bits of |x|: keys order like magnitudes.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#if STATE_BITS == 64
typedef double Real;
#define KEY_BITS 63
#define INFINITY_KEY 0x7ff0000000000000ull
#define MANTISSA_BITS 52
#else
typedef float Real;
#define KEY_BITS 31
#define INFINITY_KEY 0x7f800000ull
#define MANTISSA_BITS 23
#endif

#define THREADS 256
#define WARPS (THREADS / 32)
#define ALL_LANES 0xffffffffu
#define TILE 4096        // elements of one segment that a block updates together
#define SPAN 16          // tiles whose elements a block tallies together
#define BIN_BITS 12
#define BINS (1 << BIN_BITS)
// The first histogram of a segment with a threshold spans two octaves above it; the last bin takes all that is beyond.
#define NEAR_SHIFT (MANTISSA_BITS + 1 - BIN_BITS)
#define FAR_SHIFT (KEY_BITS - BIN_BITS)

enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16 };
enum { NO_MOMENTUM, HEAVY_BALL, NESTEROV };
// Where the entries to choose from are: in the candidates that the sweep collected, or in the whole segment; or they
// have been chosen, and only other segments of the bucket are searched once more.
enum { CANDIDATES, WHOLE, DONE };
// What became of a segment's selection.
enum { CHOSEN, OUT_OF_RANGE, BEYOND_BINS };

// One sparsified tensor in one step, as the host describes it.
struct Segment {
    const void* gradient;
    const void* parameter;  // null without weight decay
    i64 offset;             // in u and v
    u64 key;                // the least key of a candidate, at least 1
    double momentum, decay, scale;
    int length, k;
    int first_tile, tiles;
    int room, most;  // where its candidates go, and how many there may be
    int fewest;      // with fewer candidates (and a threshold) the whole segment is searched
    int gradient_type, parameter_type, form, source;
    int open;   // whether the threshold is above the smallest key, so that there may be more below
    int place;  // where its chosen entries go: room for k of them
    int unused;
};

// What is known of a segment's selection: zero before the sweep, then narrowed down.
struct Found {
    u64 low;    // the k-th largest key is in [low, low + 2^width); the key itself when width is 0
    int width;
    int want;   // how many entries with keys of that range are among the k largest
    int total;  // candidates; see dgc_count for segments that are searched as a whole
    int taken;  // entries chosen
    int base;   // where they begin in the message
    int status;
};

struct Summary {
    int count;  // entries chosen in all segments
    int nonfinite;
    int unfinished;
    int blocks;  // that have chosen their segment's entries
};

// The candidates of one tile.
struct Run {
    int start, count;
};

static_assert(sizeof(Segment) == 112 && sizeof(Found) == 32 && sizeof(Summary) == 16 && sizeof(Run) == 8,
              "the host's tables have these sizes");

struct __align__(16) Four {
    float x[4];
};
struct __align__(16) Two {
    double x[2];
};
struct __align__(8) FourHalves {
    u16 x[4];
};

// The same bits as another type.
template <class To, class From>
__device__ __forceinline__ To as_bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "the types have one size");
    union {
        From from;
        To to;
    } both;
    both.from = x;
    return both.to;
}

__device__ __forceinline__ float float_of(u32 bits) { return as_bits<float>(bits); }
__device__ __forceinline__ u32 bits_of(float x) { return as_bits<u32>(x); }
__device__ __forceinline__ u64 bits_of(double x) { return as_bits<u64>(x); }

// The magnitude whose key this is.
__device__ __forceinline__ Real real_of(u64 key) {
#if STATE_BITS == 64
    return as_bits<double>(key);
#else
    return float_of((u32)key);
#endif
}

__device__ __forceinline__ u64 key_of(float x) { return bits_of(x) & 0x7fffffffu; }
__device__ __forceinline__ u64 key_of(double x) { return bits_of(x) & 0x7fffffffffffffffull; }

// float16 -> float32, exactly. Shifted into place the bits are the number times 2^-112, denormals included; infinity
// and NaN need the exponent's remaining bits.
__device__ __forceinline__ float from_half(u16 half) {
    u32 magnitude = bits_of(float_of((half & 0x7fffu) << 13) * 5192296858534827628530496329220096.0f);
    if ((half & 0x7c00u) == 0x7c00u) magnitude |= 0x7f800000u;
    return float_of(magnitude | (half & 0x8000u) << 16);
}

__device__ __forceinline__ float from_bfloat(u16 upper) { return float_of((u32)upper << 16); }

// One element of an array of any float type, in the state's type.
__device__ __forceinline__ Real load_one(const void* array, int type, i64 i) {
    if (type == FLOAT32) return (Real)((const float*)array)[i];
    if (type == FLOAT64) return (Real)((const double*)array)[i];
    const u16 bits = ((const u16*)array)[i];
    return (Real)(type == FLOAT16 ? from_half(bits) : from_bfloat(bits));
}

__device__ __forceinline__ bool aligned(const void* address, unsigned bytes) {
    return ((u64)address & (bytes - 1)) == 0;
}

// Four elements from i on, i a multiple of 4: 16 bytes at a time (8 of the narrow types) where the address allows.
__device__ __forceinline__ void load_four(const void* array, int type, i64 i, Real* out) {
    if (type == FLOAT32 && aligned(array, 16)) {
        const Four four = ((const Four*)array)[i / 4];
        for (int j = 0; j < 4; j++) out[j] = (Real)four.x[j];
    } else if (type == FLOAT64 && aligned(array, 16)) {
        const Two low = ((const Two*)array)[i / 2], high = ((const Two*)array)[i / 2 + 1];
        out[0] = (Real)low.x[0], out[1] = (Real)low.x[1], out[2] = (Real)high.x[0], out[3] = (Real)high.x[1];
    } else if (type >= FLOAT16 && aligned(array, 8)) {
        const FourHalves four = ((const FourHalves*)array)[i / 4];
        for (int j = 0; j < 4; j++) out[j] = (Real)(type == FLOAT16 ? from_half(four.x[j]) : from_bfloat(four.x[j]));
    } else {
        for (int j = 0; j < 4; j++) out[j] = load_one(array, type, i + j);
    }
}

__device__ __forceinline__ void store_four(Real* array, i64 i, const Real* from) {
    if (!aligned(array, 16)) {
        for (int j = 0; j < 4; j++) array[i + j] = from[j];
        return;
    }
#if STATE_BITS == 64
    Two low, high;
    low.x[0] = from[0], low.x[1] = from[1], high.x[0] = from[2], high.x[1] = from[3];
    ((Two*)array)[i / 2] = low;
    ((Two*)array)[i / 2 + 1] = high;
#else
    Four four;
    for (int j = 0; j < 4; j++) four.x[j] = from[j];
    ((Four*)array)[i / 4] = four;
#endif
}

#define STATE_TYPE (STATE_BITS == 64 ? FLOAT64 : FLOAT32)

// The sum of the values of all threads before this one, and of all threads. Every thread of the block must call it.
__device__ __forceinline__ u64 sum_before(u64 value, u64* total) {
    __shared__ u64 sums[WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u64 inclusive = value;
    for (int d = 1; d < 32; d *= 2) {
        const u64 other = __shfl_up_sync(ALL_LANES, inclusive, d);
        if (lane >= d) inclusive += other;
    }
    __syncthreads();  // a former call's sums have been read
    if (lane == 31) sums[warp] = inclusive;
    __syncthreads();
    u64 before = 0, all = 0;
    for (int w = 0; w < WARPS; w++) {
        if (w < warp) before += sums[w];
        all += sums[w];
    }
    *total = all;
    return before + inclusive - value;
}

__device__ __forceinline__ u64 warp_sum(u64 value) {
    for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(ALL_LANES, value, d);
    return value;
}
