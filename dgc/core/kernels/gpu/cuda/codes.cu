// Whole tensors in few bits: the scales and codes of the quantising compressors, in the messages that the host would
// write. In which order sums are made is said in dgc/core/compressors/quantizers/codes.py.
//
// One launch for all tensors of a bucket: block b works on part b - first of tensor `owner[b]`.

enum { SIGNED_CODES, SPAN_CODES, SIGN_CODES };

#define ROWS 64  // rows of a matrix that are added up together

// One tensor, as the host describes it for one launch.
struct Coded {
    Real* values;     // (length): what is rounded, or what is added to
    i64 length;
    i64 scales;       // where in a message its scales begin
    i64 codes;        // and its codes
    i64 bytes;        // of its codes, padding included: a multiple of 4
    i64 partial;      // where its partial sums begin
    u64 key;          // of its random numbers
    double limit;     // magnitudes are cut there
    float scale;      // of the whole tensor; below 0: the message has the scales already
    int kind, bits, levels;  // bits 0: five codes to a byte, as a number to the base 3
    int group;        // elements that share a scale
    int columns, inner;  // element i of a sign is in column i / inner % columns, which has two scales
    int first;        // block
};

static_assert(sizeof(Coded) == 96, "the host's table");

__device__ __forceinline__ Coded coded_of_block(const Coded* tensors, const int* owner, int* part) {
    const Coded tensor = tensors[owner[blockIdx.x]];
    *part = (int)blockIdx.x - tensor.first;
    return tensor;
}

__device__ __forceinline__ double magnitude_of(double x) { return x < 0 ? -x : x; }

__device__ __forceinline__ double warp_sum_of(double value) {
    for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(ALL_LANES, value, d);
    return value;
}

__device__ __forceinline__ double warp_largest(double value) {
    for (int d = 16; d > 0; d /= 2) {
        const double other = __shfl_xor_sync(ALL_LANES, value, d);
        if (other > value) value = other;
    }
    return value;
}

// The sum of all threads' values, and the largest. Every thread of the block must call it.
__device__ __forceinline__ double tile_sum(double value, double largest, double* most) {
    __shared__ double sums[WARPS], tops[WARPS];
    value = warp_sum_of(value);
    largest = warp_largest(largest);
    __syncthreads();  // a former call's sums have been read
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = value, tops[threadIdx.x >> 5] = largest;
    __syncthreads();
    double total = 0;
    *most = 0;
    for (int w = 0; w < WARPS; w++) {
        total += sums[w];
        if (tops[w] > *most) *most = tops[w];
    }
    return total;
}

// Of each tile the largest magnitude, the sum, and the squares' sum about the mean. grid (tiles), block (THREADS).
// out: (tiles, 3).
extern "C" __global__ void __launch_bounds__(THREADS) dgc_moments(
    const Coded* __restrict__ tensors, const int* __restrict__ owner, double* __restrict__ out) {
    int part;
    const Coded tensor = coded_of_block(tensors, owner, &part);
    const i64 start = (i64)part * TILE;
    const int size = tensor.length - start < TILE ? (int)(tensor.length - start) : TILE;
    double sum = 0, largest = 0, most;
    for (int i = threadIdx.x; i < size; i += THREADS) {
        const double x = (double)tensor.values[start + i];
        if (magnitude_of(x) > largest) largest = magnitude_of(x);
        sum += x;
    }
    const double total = tile_sum(sum, largest, &most), mean = total / size;
    double squares = 0, unused;
    for (int i = threadIdx.x; i < size; i += THREADS) {
        const double apart = (double)tensor.values[start + i] - mean;
        squares += apart * apart;
    }
    squares = tile_sum(squares, 0, &unused);
    if (threadIdx.x != 0) return;
    double* const own = out + 3 * (i64)blockIdx.x;
    own[0] = most, own[1] = total, own[2] = squares;
}

// Each group's norm as a float32 that is not below its largest magnitude. grid (groups / WARPS), block (THREADS): one
// warp for each group.
extern "C" __global__ void __launch_bounds__(THREADS) dgc_norms(
    const Coded* __restrict__ tensors, const int* __restrict__ owner, u8* __restrict__ message, int squared) {
    int part;
    const Coded tensor = coded_of_block(tensors, owner, &part);
    const i64 g = (i64)part * WARPS + (threadIdx.x >> 5), start = g * tensor.group;
    if (start >= tensor.length) return;
    const i64 stop = tensor.length - start < tensor.group ? tensor.length : start + tensor.group;
    double sum = 0, largest = 0;
    for (i64 i = start + (threadIdx.x & 31); i < stop; i += 32) {
        const double x = magnitude_of((double)tensor.values[i]);
        if (x > largest) largest = x;
        sum += x * x;
    }
    sum = warp_sum_of(sum);
    largest = warp_largest(largest);
    if ((threadIdx.x & 31) != 0) return;
    const double root = squared ? sqrt(sum) : 0, exact = root > largest ? root : largest;
    const float top = float_of(0x7f7fffffu);
    float norm = exact < (double)top ? (float)exact : top;
#if STATE_BITS == 64  // a float32 is never below the largest of its kind
    if ((double)norm < exact && norm < top) norm = float_of(bits_of(norm) + 1);
#endif
    ((float*)(message + tensor.scales))[g] = norm;
}

// Partial sums of the entries of either sign, of pieces of ROWS rows down each column. grid (pieces x THREADS columns),
// block (THREADS): one thread for each column.
//
// low, high: sums of those below 0 and of the others. above: how many the others are. Each (pieces, columns).
extern "C" __global__ void __launch_bounds__(THREADS) dgc_split_rows(
    const Coded* __restrict__ tensors, const int* __restrict__ owner, double* __restrict__ low,
    double* __restrict__ high, int* __restrict__ above) {
    int part;
    const Coded tensor = coded_of_block(tensors, owner, &part);
    const int across = (tensor.columns + THREADS - 1) / THREADS;
    const int c = part % across * THREADS + threadIdx.x;
    if (c >= tensor.columns) return;
    const i64 piece = part / across, rows = tensor.length / tensor.columns, first = piece * ROWS;
    const i64 stop = rows - first < ROWS ? rows : first + ROWS;
    double below_sum = 0, above_sum = 0;
    int count = 0;
    for (i64 r = first; r < stop; r++) {
        const double x = (double)tensor.values[r * tensor.columns + c];
        const bool negative = x < 0;
        below_sum += negative ? x : 0.0;
        above_sum += negative ? 0.0 : x;
        count += !negative;
    }
    const i64 at = tensor.partial + piece * tensor.columns + c;
    low[at] = below_sum, high[at] = above_sum, above[at] = count;
}

// The same of tiles of columns that lie in one piece each. grid (columns x tiles of a column), block (THREADS).
extern "C" __global__ void __launch_bounds__(THREADS) dgc_split_runs(
    const Coded* __restrict__ tensors, const int* __restrict__ owner, double* __restrict__ low,
    double* __restrict__ high, int* __restrict__ above) {
    int part;
    const Coded tensor = coded_of_block(tensors, owner, &part);
    const i64 piece = part / tensor.columns, c = part % tensor.columns, start = piece * TILE;
    const int size = tensor.inner - start < TILE ? (int)(tensor.inner - start) : TILE;
    const Real* const run = tensor.values + c * tensor.inner + start;
    double below_sum = 0, above_sum = 0, unused;
    u64 count = 0;
    for (int i = threadIdx.x; i < size; i += THREADS) {
        const double x = (double)run[i];
        const bool negative = x < 0;
        below_sum += negative ? x : 0.0;
        above_sum += negative ? 0.0 : x;
        count += !negative;
    }
    below_sum = tile_sum(below_sum, 0, &unused);
    above_sum = tile_sum(above_sum, 0, &unused);
    u64 total;
    sum_before(count, &total);
    if (threadIdx.x != 0) return;
    const i64 at = tensor.partial + piece * tensor.columns + c;
    low[at] = below_sum, high[at] = above_sum, above[at] = (int)total;
}

__device__ __forceinline__ float as_mean(double sum, i64 count) {
    if (count == 0) return 0.0f;
    const float mean = (float)(sum / (double)count), top = float_of(0x7f7fffffu);
    return mean > top ? top : mean < -top ? -top : mean;
}

// The means of either sign of each column. grid (columns / THREADS), block (THREADS): one thread for each column.
extern "C" __global__ void __launch_bounds__(THREADS) dgc_means(
    const Coded* __restrict__ tensors, const int* __restrict__ owner, const double* __restrict__ low,
    const double* __restrict__ high, const int* __restrict__ above, u8* __restrict__ message) {
    int part;
    const Coded tensor = coded_of_block(tensors, owner, &part);
    const i64 c = (i64)part * THREADS + threadIdx.x;
    if (c >= tensor.columns) return;
    const i64 rows = tensor.length / tensor.columns, each = tensor.inner == 1 ? ROWS : TILE;
    const i64 pieces = (rows + each - 1) / each;
    double below_sum = 0, above_sum = 0;
    i64 count = 0;
    for (i64 piece = 0; piece < pieces; piece++) {
        const i64 at = tensor.partial + piece * tensor.columns + c;
        below_sum += low[at];
        above_sum += high[at];
        count += above[at];
    }
    float* const means = (float*)(message + tensor.scales);
    means[c] = as_mean(below_sum, rows - count);
    means[tensor.columns + c] = as_mean(above_sum, count);
}

// Random number i of a key, in [0, 1): SplitMix64 (Steele et al. 2014).
__device__ __forceinline__ double random_number(u64 key, i64 i) {
    u64 z = key + ((u64)i + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    return (double)(z >> 32) * 2.3283064365386962890625e-10;  // 2^-32
}

// What codes of one scale have in common.
struct Rounding {
    i64 group;
    double factor;  // 0: all become the code of 0
};

__device__ __forceinline__ u32 code_of(const Coded& tensor, i64 i, const u8* message, Rounding& rounding) {
    const double x = (double)tensor.values[i];
    if (tensor.kind == SIGN_CODES) return !(x < 0);
    const double levels = (double)tensor.levels;
    const i64 group = tensor.scale >= 0 ? 0 : i / tensor.group;
    if (group != rounding.group) {
        const double scale = tensor.scale >= 0 ? tensor.scale : ((const float*)(message + tensor.scales))[group];
        rounding.group = group;
        rounding.factor = scale == 0 ? 0 : tensor.kind == SPAN_CODES ? 0.5 / scale : levels / scale;
    }
    if (rounding.factor == 0) return tensor.kind == SPAN_CODES ? 0 : tensor.levels;
    const double noise = random_number(tensor.key, i);
    if (tensor.kind == SPAN_CODES) {
        const double place = (x * rounding.factor + 0.5) * levels + noise;
        return place <= 0 ? 0 : place < levels ? (u32)place : (u32)tensor.levels;
    }
    const double magnitude = magnitude_of(x);
    const double place = (magnitude < tensor.limit ? magnitude : tensor.limit) * rounding.factor + noise;
    const int level = place < levels ? (int)place : tensor.levels;
    return (u32)(x < 0 ? tensor.levels - level : tensor.levels + level);
}

// Round, and write the codes, with zeros in the padding; and the scale, where it is of a whole tensor.
// grid (bytes of codes / TILE), block (THREADS): each thread writes some words of four bytes.
extern "C" __global__ void __launch_bounds__(THREADS) dgc_encode(
    const Coded* __restrict__ tensors, const int* __restrict__ owner, u8* message) {
    int part;
    const Coded tensor = coded_of_block(tensors, owner, &part);
    if (tensor.scale >= 0 && part == 0 && threadIdx.x == 0) *(float*)(message + tensor.scales) = tensor.scale;
    Rounding rounding = {-1, 0};
    for (int j = threadIdx.x; j < TILE / 4; j += THREADS) {
        const i64 at = (i64)part * TILE + 4 * j;
        if (at >= tensor.bytes) return;
        u32 word = 0;
        if (tensor.bits == 0) {
            for (int b = 0; b < 4; b++) {
                const i64 first = (at + b) * 5;
                u32 byte = 0;
                for (int digit = 4; digit >= 0; digit--)
                    byte = 3 * byte + (first + digit < tensor.length ? code_of(tensor, first + digit, message, rounding) : 0);
                word |= byte << 8 * b;
            }
        } else {
            for (i64 i = 8 * at / tensor.bits; i < tensor.length && i * tensor.bits < 8 * at + 32; i++) {
                const int place = (int)(i * tensor.bits - 8 * at);
                const u32 code = code_of(tensor, i, message, rounding);
                word |= place >= 0 ? code << place : code >> -place;
            }
        }
        *(u32*)(message + tensor.codes + at) = word;
    }
}

// The value of an element in a message; `*damaged` where its code is none that a sender writes.
__device__ __forceinline__ float decoded(const Coded& tensor, i64 i, const u8* message, bool* damaged) {
    const float* const scales = (const float*)(message + tensor.scales);
    const u8* const codes = message + tensor.codes;
    u32 code;
    if (tensor.bits == 0) {
        code = codes[i / 5];
        *damaged = *damaged || code > 242;
        for (int digit = (int)(i % 5); digit > 0; digit--) code /= 3;
        code %= 3;
    } else {
        const i64 bit = i * tensor.bits;
        const int shift = (int)(bit & 7);
        code = codes[bit >> 3];
        if (shift + tensor.bits > 8) code |= (u32)codes[(bit >> 3) + 1] << 8;
        code = code >> shift & ((1u << tensor.bits) - 1);
    }
    if (tensor.kind == SIGN_CODES)
        return scales[(code ? tensor.columns : 0) + i / tensor.inner % tensor.columns];
    const float unit = scales[i / tensor.group] / (float)tensor.levels;
    if (tensor.kind == SPAN_CODES) return (float)(2 * (int)code - tensor.levels) * unit;
    *damaged = *damaged || (int)code > 2 * tensor.levels;
    const float value = (float)((int)code - tensor.levels) * unit, top = float_of(0x7f7fffffu);
    return value > top ? top : value < -top ? -top : value;
}

// Add up what messages hold, in their order, times `factor`: to what is there, or in its place.
// grid (tiles), block (THREADS). came: a message every `stride` bytes.
//
// met: in the host's memory; the first becomes 1 where a message is damaged, the second where a sum is not finite.
extern "C" __global__ void __launch_bounds__(THREADS) dgc_decode(
    const Coded* __restrict__ tensors, const int* __restrict__ owner, const u8* __restrict__ came, i64 stride,
    int messages, double factor, int adds, int* __restrict__ met) {
    int part;
    const Coded tensor = coded_of_block(tensors, owner, &part);
    const i64 start = (i64)part * TILE;
    const i64 stop = tensor.length - start < TILE ? tensor.length : start + TILE;
    const Real share = (Real)factor;
    bool damaged = false, infinite = false;
    for (i64 i = start + threadIdx.x; i < stop; i += THREADS) {
        Real sum = adds ? tensor.values[i] : (Real)0;
        for (int m = 0; m < messages; m++) sum = sum + (Real)decoded(tensor, i, came + m * stride, &damaged) * share;
        infinite = infinite || key_of(sum) >= INFINITY_KEY;
        tensor.values[i] = sum;
    }
    if (damaged) met[0] = 1;
    if (infinite) met[1] = 1;
}
