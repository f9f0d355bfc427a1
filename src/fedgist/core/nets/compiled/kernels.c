/* Convolutions of stacked clients.

   The batch is the innermost dimension of all images in here: [channel][row][column][image]. So a
   vector holds neighbouring numbers of one row, every shift by a column is a shift by `batch`
   numbers, and no window is ever gathered.

   Sums are in float32. The order of their terms depends on the width of the machine's vectors, but
   neither on the number of clients in the stack nor on the number of threads. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* LANES: numbers in a vector. OUTS x WIDE, OUTS x TAPS: vectors of sums that are kept in registers
   by the two inner loops below. */
#if defined(__AVX512F__)
#define LANES 16
#define OUTS 5
#define WIDE 5
#define TAPS 5
#else
#if defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define OUTS 4
#define WIDE 3
#define TAPS 3
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint8_t loose_bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

#define LOAD(at) (*(const loose *)(at))
#define STORE(at, value) (*(loose *)(at) = (value))
#define SELECT(mask, yes, no) ((vec)(((ints)(yes) & (mask)) | ((ints)(no) & ~(mask))))
#define SMALLER(a, b) ((a) < (b) ? (a) : (b))
#define INLINE static inline __attribute__((always_inline))
#define SLACK (WIDE * LANES) /* numbers that loads may read beyond the end */

/* Keep a loaded vector in a register: the compiler would load it again for each use. */
#if defined(__AVX512F__)
#define HOLD(value) __asm__("" : "+v"(value))
#elif defined(__AVX__)
#define HOLD(value) __asm__("" : "+x"(value))
#else
#define HOLD(value)
#endif

/* One layer for all clients of a stack. Strides count numbers. */
typedef struct {
    int64_t clients, batch, in, height, width, out, rows, cols, pad_rows, pad_cols, pool, relu;
    int64_t x_client, x_batch, x_in, x_row, x_col, w_client, b_client;
} layer;

/* The sizes that follow from a layer, for `batch` images. */
typedef struct {
    int64_t batch, height, width;    /* of the padded input */
    int64_t out_height, out_width;   /* before pooling */
    int64_t top_height, top_width;   /* after pooling */
    int64_t taps, run, line;         /* numbers in a row of output, and rounded up to vectors */
} sizes;

static sizes sizes_of(const layer *of, int64_t batch) {
    sizes s = {.batch = batch};
    s.height = of->height + 2 * of->pad_rows;
    s.width = of->width + 2 * of->pad_cols;
    s.out_height = s.height - of->rows + 1;
    s.out_width = s.width - of->cols + 1;
    s.top_height = of->pool ? s.out_height / 2 : s.out_height;
    s.top_width = of->pool ? s.out_width / 2 : s.out_width;
    s.taps = of->rows * of->cols;
    s.run = s.out_width * batch;
    s.line = (s.run + LANES - 1) / LANES * LANES;
    return s;
}

/* Images of a batch are taken so many at a time, in even parts: enough for vectors, and parts
   enough for threads. Other numbers, as few as fit in a cache or all, took as long. */
#define AT_ONCE 64

static int64_t images_at_once(int64_t batch) {
    int64_t parts = (batch + AT_ONCE - 1) / AT_ONCE;
    return (batch + parts - 1) / parts;
}

/* ---- The inner loops ---- */

/* Sums over planes, rows and columns of taps: dst[o][i] = sum w[o][plane][row][col] src[...][i],
   for `outs` outputs and `wide` vectors. */
#define SUMS                                                                                    \
    const float *src, int64_t plane, int64_t row, int64_t col, int64_t planes, int64_t rows,    \
        int64_t cols, const float *w, int64_t w_out, int64_t w_plane, int64_t w_row, float *dst, \
        int64_t dst_out

INLINE void sums(const int outs, const int wide, SUMS) {
    vec acc[OUTS][WIDE];
    for (int o = 0; o < outs; o++)
        for (int v = 0; v < wide; v++) acc[o][v] = (vec){0};
    for (int64_t p = 0; p < planes; p++)
        for (int64_t r = 0; r < rows; r++) {
            const float *s = src + p * plane + r * row, *g = w + p * w_plane + r * w_row;
            for (int64_t c = 0; c < cols; c++, s += col, g++) {
                vec x[WIDE];
                for (int v = 0; v < wide; v++) {
                    x[v] = LOAD(s + v * LANES);
                    HOLD(x[v]);
                }
                for (int o = 0; o < outs; o++)
                    for (int v = 0; v < wide; v++) acc[o][v] += g[o * w_out] * x[v];
            }
        }
    for (int o = 0; o < outs; o++)
        for (int v = 0; v < wide; v++) STORE(dst + o * dst_out + v * LANES, acc[o][v]);
}

/* Products of two rows, summed over `rows` rows: dw[o][t] += sum y[o][row][i] x[row][i + t col]. */
#define PRODUCTS                                                                              \
    const float *y, int64_t y_out, int64_t y_row, const float *x, int64_t x_row, int64_t col, \
        int64_t rows, int64_t length, float *dw, int64_t dw_out, int64_t dw_tap

INLINE void products(const int outs, const int taps, PRODUCTS) {
    vec acc[OUTS][TAPS];
    for (int o = 0; o < outs; o++)
        for (int t = 0; t < taps; t++) acc[o][t] = (vec){0};
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < length; i += LANES) {
            vec g[OUTS];
            for (int o = 0; o < outs; o++) {
                g[o] = LOAD(y + o * y_out + r * y_row + i);
#if defined(__AVX512F__) /* other machines have too few registers */
                HOLD(g[o]);
#endif
            }
            for (int t = 0; t < taps; t++) {
                vec v = LOAD(x + r * x_row + t * col + i);
                HOLD(v);
                for (int o = 0; o < outs; o++) acc[o][t] += g[o] * v;
            }
        }
    for (int o = 0; o < outs; o++)
        for (int t = 0; t < taps; t++) {
            float sum = 0;
            for (int l = 0; l < LANES; l++) sum += acc[o][t][l];
            dw[o * dw_out + t * dw_tap] += sum;
        }
}

/* A copy of both loops for every size, so that their sums stay in registers. */
#define SUMS_OF(o, v)                                                                   \
    static __attribute__((noinline)) void sums_##o##_##v(SUMS) {                        \
        sums(o, v, src, plane, row, col, planes, rows, cols, w, w_out, w_plane, w_row, dst, \
             dst_out);                                                                  \
    }
#define PRODUCTS_OF(o, t)                                                               \
    static __attribute__((noinline)) void products_##o##_##t(PRODUCTS) {                \
        products(o, t, y, y_out, y_row, x, x_row, col, rows, length, dw, dw_out, dw_tap); \
    }
#define THREE(MAKE, o) MAKE(o, 1) MAKE(o, 2) MAKE(o, 3)
#if OUTS == 5
#define FIVE(MAKE, o) THREE(MAKE, o) MAKE(o, 4) MAKE(o, 5)
#define EVERY(MAKE) FIVE(MAKE, 1) FIVE(MAKE, 2) FIVE(MAKE, 3) FIVE(MAKE, 4) FIVE(MAKE, 5)
#define NAMES(f, o) {f##_##o##_1, f##_##o##_2, f##_##o##_3, f##_##o##_4, f##_##o##_5}
#define TABLE(f) {NAMES(f, 1), NAMES(f, 2), NAMES(f, 3), NAMES(f, 4), NAMES(f, 5)}
#else
#define EVERY(MAKE) THREE(MAKE, 1) THREE(MAKE, 2) THREE(MAKE, 3) THREE(MAKE, 4)
#define NAMES(f, o) {f##_##o##_1, f##_##o##_2, f##_##o##_3}
#define TABLE(f) {NAMES(f, 1), NAMES(f, 2), NAMES(f, 3), NAMES(f, 4)}
#endif
EVERY(SUMS_OF)
EVERY(PRODUCTS_OF)
static void (*const sums_by_size[OUTS][WIDE])(SUMS) = TABLE(sums);
static void (*const products_by_size[OUTS][TAPS])(PRODUCTS) = TABLE(products);

/* `count` things in the fewest groups of at most `most`, as even as possible: the next group. */
static int64_t next_group(int64_t left, int64_t most) {
    int64_t groups = (left + most - 1) / most;
    return left / groups;
}

/* One row, `length` numbers long, of all outputs. */
static void row_of_sums(int64_t outs, int64_t length, SUMS) {
    for (int64_t i = 0; i < length; i += WIDE * LANES) {
        int64_t wide = SMALLER((length - i + LANES - 1) / LANES, WIDE);
        for (int64_t o = 0, n; o < outs; o += n) {
            n = next_group(outs - o, OUTS);
            sums_by_size[n - 1][wide - 1](src + i, plane, row, col, planes, rows, cols,
                                          w + o * w_out, w_out, w_plane, w_row,
                                          dst + o * dst_out + i, dst_out);
        }
    }
}

/* ---- Rows of images ---- */

typedef struct {
    float *at;
    size_t room;
} scratch;

static __thread scratch inputs, outputs, row;

/* Return room for `count` numbers, which stays for the next call; NULL without memory. */
static float *room(scratch *of, size_t count) {
    if (of->room < count) {
        free(of->at);
        of->at = aligned_alloc(64, (4 * count + 63) / 64 * 64);
        of->room = of->at ? count : 0;
    }
    return of->at;
}

/* Copy images `first`, ... of a client with a border of zeros: to [in][height][width][batch]. */
static void take_images(const layer *of, const sizes *s, const float *x, int64_t first, float *to) {
    int64_t batch = s->batch, area = s->height * s->width * batch;
    if (of->pad_rows || of->pad_cols) memset(to, 0, 4 * of->in * area);
    memset(to + of->in * area, 0, 4 * SLACK);
    x += first * of->x_batch;
    for (int64_t c = 0; c < of->in; c++)
        for (int64_t h = 0; h < of->height; h++) {
            const float *from = x + c * of->x_in + h * of->x_row;
            float *line = to + c * area + ((h + of->pad_rows) * s->width + of->pad_cols) * batch;
            if (of->x_batch == 1 && of->x_col == batch)
                memcpy(line, from, 4 * of->width * batch);
            else if (of->x_batch == 1)
                for (int64_t i = 0; i < of->width; i++)
                    memcpy(line + i * batch, from + i * of->x_col, 4 * batch);
            else
                for (int64_t n = 0; n < batch; n++)
                    for (int64_t i = 0; i < of->width; i++)
                        line[i * batch + n] = from[n * of->x_batch + i * of->x_col];
        }
}

/* Store the first `count` numbers. `whole`: those behind may be overwritten. */
INLINE void put(float *to, vec value, int64_t count, int whole) {
    if (whole || count >= LANES)
        STORE(to, value);
    else
        memcpy(to, &value, 4 * count);
}

INLINE vec get(const float *from, int64_t count, int whole) {
    vec value = {0};
    if (whole || count >= LANES) return LOAD(from);
    memcpy(&value, from, 4 * count);
    return value;
}

/* The larger of two, and its number; NaN wins, so that it is not lost. The first of equals wins. */
INLINE void larger(vec *most, ints *which, vec other, int number) {
    ints take = (other > *most) | (other != other);
    *most = SELECT(take, other, *most);
    *which = (take & number) | (~take & *which);
}

INLINE vec positive(vec value) { return SELECT(value < 0, (vec){0}, value); }

/* Pool two rows by 2x2, and add the bias. `step`: numbers from a column of `out` to the next.
   A vector may pass the end of a column, because the next column is written after it. */
static void pool_rows(const float *top, const float *low, float bias, int relu, int64_t width,
                      int64_t batch, int64_t step, float *out, uint8_t *which) {
    for (int64_t i = 0; i < width; i++) {
        for (int64_t n = 0; n < batch; n += LANES) {
            vec most = LOAD(top + n);
            ints number = {0};
            larger(&most, &number, LOAD(top + n + batch), 1);
            larger(&most, &number, LOAD(low + n), 2);
            larger(&most, &number, LOAD(low + n + batch), 3);
            most += bias;
            if (relu) most = positive(most);
            bytes small = __builtin_convertvector(number, bytes);
            int whole = step == batch && (width - i) * batch - n >= LANES;
            put(out + n, most, batch - n, whole);
            if (whole || batch - n >= LANES)
                *(loose_bytes *)(which + n) = small;
            else
                memcpy(which + n, &small, batch - n);
        }
        top += 2 * batch, low += 2 * batch, out += step, which += step;
    }
}

/* Add the bias to a row of outputs. */
static void finish_row(const float *from, float bias, int relu, int64_t width, int64_t batch,
                       int64_t step, float *out) {
    if (step == batch) batch *= width, step = batch, width = 1; /* one long column */
    for (int64_t i = 0; i < width; i++, from += batch, out += step)
        for (int64_t n = 0; n < batch; n += LANES) {
            vec value = LOAD(from + n) + bias;
            if (relu) value = positive(value);
            put(out + n, value, batch - n, 0);
        }
}

static ints lane_numbers(void) {
    ints lanes;
    for (int l = 0; l < LANES; l++) lanes[l] = l;
    return lanes;
}

static float total(vec value) {
    float sum = 0;
    for (int l = 0; l < LANES; l++) sum += value[l];
    return sum;
}

/* The gradient of pool_rows: spread `grad` over two rows, and return its sum. Later images of a
   column come first, so that what passes its end is written after it. */
static float spread_rows(const float *grad, const float *out, const uint8_t *which, int relu,
                         int64_t width, int64_t batch, int64_t step, float *top, float *low) {
    ints lanes = lane_numbers();
    vec sum = {0};
    for (int64_t i = 0; i < width; i++, grad += step, out += step, which += step)
        for (int64_t n = (batch - 1) / LANES * LANES; n >= 0; n -= LANES) {
            int64_t count = batch - n, at = 2 * i * batch + n;
            int whole = step == batch && (width - i) * batch - n >= LANES;
            int wide = (2 * (width - i) - 1) * batch - n >= LANES;
            vec g = get(grad + n, count, whole);
            if (relu) g = SELECT(get(out + n, count, whole) == 0, (vec){0}, g);
            g = SELECT(lanes < (int)SMALLER(count, LANES), g, (vec){0});
            bytes small = {0};
            if (whole || count >= LANES)
                small = *(const loose_bytes *)(which + n);
            else
                memcpy(&small, which + n, count);
            ints number = __builtin_convertvector(small, ints);
            sum += g;
            put(top + at, SELECT(number == 0, g, (vec){0}), count, wide);
            put(low + at, SELECT(number == 2, g, (vec){0}), count, wide);
            put(top + at + batch, SELECT(number == 1, g, (vec){0}), count, wide);
            put(low + at + batch, SELECT(number == 3, g, (vec){0}), count, wide);
        }
    return total(sum);
}

/* The gradient of finish_row. */
static float back_row(const float *grad, const float *out, int relu, int64_t width, int64_t batch,
                      int64_t step, float *to) {
    float sum = 0;
    for (int64_t i = 0; i < width; i++, grad += step, out += step, to += batch)
        for (int64_t n = 0; n < batch; n++) {
            to[n] = relu && out[n] == 0 ? 0 : grad[n];
            sum += to[n];
        }
    return sum;
}

static void forward_images(const layer *of, const sizes *s, const float *xs, float *rs,
                           const float *w, const float *b, float *out, uint8_t *which) {
    int64_t lines = of->pool ? 2 : 1, plane = s->height * s->width * s->batch;
    for (int64_t y = 0; y < s->top_height; y++) {
        for (int64_t r = 0; r < lines; r++)
            row_of_sums(of->out, s->run, xs + (y * lines + r) * s->width * s->batch, plane,
                        s->width * s->batch, s->batch, of->in, of->rows, of->cols, w,
                        of->in * s->taps, s->taps, of->cols, rs + r * of->out * s->line, s->line);
        for (int64_t o = 0; o < of->out; o++) {
            int64_t at = (o * s->top_height + y) * s->top_width * of->batch;
            const float *from = rs + o * s->line;
            float bias = b ? b[o] : 0;
            if (of->pool)
                pool_rows(from, from + of->out * s->line, bias, of->relu, s->top_width, s->batch,
                          of->batch, out + at, which + at);
            else
                finish_row(from, bias, of->relu, s->top_width, s->batch, of->batch, out + at);
        }
    }
}

/* Gradient before pooling, with zeros around each row, to ys; its sums are added to db. */
static void gradient_rows(const layer *of, const sizes *s, int64_t lead, int64_t line,
                          const float *out, const uint8_t *which, const float *grad, float *ys,
                          float *db) {
    for (int64_t o = 0; o < of->out; o++) {
        float sum = 0;
        for (int64_t y = 0; y < s->top_height; y++) {
            int64_t at = (o * s->top_height + y) * s->top_width * of->batch;
            float *to = ys + (o * s->out_height + (of->pool ? 2 * y : y)) * line + lead;
            if (of->pool)
                sum += spread_rows(grad + at, out + at, which + at, of->relu, s->top_width,
                                   s->batch, of->batch, to, to + line);
            else
                sum += back_row(grad + at, out + at, of->relu, s->top_width, s->batch, of->batch,
                                to);
        }
        if (db) db[o] += sum;
    }
}

static void weight_gradient(const layer *of, const sizes *s, int64_t lead, int64_t line,
                            const float *xs, const float *ys, float *dw) {
    int64_t plane = s->out_height * line;
    for (int64_t o = 0, n; o < of->out; o += n) {
        n = next_group(of->out - o, OUTS);
        for (int64_t c = 0; c < of->in; c++)
            for (int64_t r = 0; r < of->rows; r++)
                for (int64_t t = 0, m; t < of->cols; t += m) {
                    m = next_group(of->cols - t, TAPS);
                    products_by_size[n - 1][m - 1](
                        ys + o * plane + lead, plane, line,
                        xs + ((c * s->height + r) * s->width + t) * s->batch, s->width * s->batch,
                        s->batch, s->out_height, s->run,
                        dw + (o * of->in + c) * s->taps + r * of->cols + t, of->in * s->taps, 1);
                }
    }
}

static void input_gradient(const layer *of, const sizes *s, int64_t lead, int64_t line,
                           const float *ys, float *rs, const float *w, float *dx) {
    int64_t run = of->width * s->batch, room_of_row = run + SLACK;
    for (int64_t y = 0; y < of->height; y++) {
        /* row y of the input is in the outputs padded - r, for those taps r that exist */
        int64_t padded = y + of->pad_rows, last = SMALLER(of->rows - 1, padded);
        int64_t first = padded < s->out_height ? 0 : padded - s->out_height + 1;
        row_of_sums(of->in, run, ys + (padded - first) * line + lead + of->pad_cols * s->batch,
                    s->out_height * line, -line, -s->batch, of->out, last - first + 1, of->cols,
                    w + first * of->cols, s->taps, of->in * s->taps, of->cols, rs, room_of_row);
        for (int64_t c = 0; c < of->in; c++) {
            float *to = dx + (c * of->height + y) * of->width * of->batch;
            const float *from = rs + c * room_of_row;
            for (int64_t i = 0; i < of->width; i++)
                memcpy(to + i * of->batch, from + i * s->batch, 4 * s->batch);
        }
    }
}

/* ---- A layer ---- */

/* The layer's arrays. The images of one client that are taken at a time are a piece of work. */
typedef struct {
    const layer *of;
    const float *x, *w, *b, *grad;
    float *out, *dx, *dw, *db;
    uint8_t *which;
    float *parts; /* weight and bias gradients of the pieces beyond the first of each client */
    int64_t pieces;
    int failed;
} task;

typedef void work(task *of, int64_t client, int64_t piece);

/* Do all pieces of a task. The threads are torch's own, by OpenMP: others would compete with them.
   A compiler without OpenMP leaves one. */
static int in_threads(work *todo, task *of, int64_t threads) {
    int64_t count = of->of->clients * of->pieces;
#if defined(_OPENMP)
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && count > 1)
#endif
    for (int64_t i = 0; i < count; i++) todo(of, i / of->pieces, i % of->pieces);
    return of->failed;
}

static void forward_piece(task *given, int64_t client, int64_t piece) {
    const layer *of = given->of;
    int64_t most = images_at_once(of->batch), first = piece * most;
    sizes s = sizes_of(of, SMALLER(most, of->batch - first));
    float *xs = room(&inputs, of->in * s.height * s.width * s.batch + SLACK);
    float *rs = room(&row, 2 * of->out * s.line + 2 * SLACK + 2 * s.batch);
    if (!xs || !rs) {
        given->failed = 1;
        return;
    }
    int64_t at = client * of->out * s.top_height * s.top_width * of->batch + first;
    take_images(of, &s, given->x + client * of->x_client, first, xs);
    forward_images(of, &s, xs, rs, given->w + client * of->w_client,
                   given->b ? given->b + client * of->b_client : NULL, given->out + at,
                   given->which ? given->which + at : NULL);
}

/* Convolve, add the bias if there is one, pool by 2x2 and cut at zero if the layer does.
   out and which (which number of each window, if pooled): [client][out][row][column][image].
   Returns 0, or 1 without memory. */
int fedgist_convolve(const layer *of, int64_t threads, const float *x, const float *w,
                     const float *b, float *out, uint8_t *which) {
    task all = {.of = of, .x = x, .w = w, .b = b, .out = out, .which = which};
    int64_t most = images_at_once(of->batch);
    all.pieces = (of->batch + most - 1) / most;
    return in_threads(forward_piece, &all, threads);
}

static void backward_piece(task *given, int64_t client, int64_t piece) {
    const layer *of = given->of;
    int64_t most = images_at_once(of->batch), first = piece * most;
    sizes s = sizes_of(of, SMALLER(most, of->batch - first));
    int64_t lead = (of->cols - 1) * s.batch, line = s.run + 2 * lead + SLACK;
    size_t count = of->out * s.out_height * line + SLACK;
    float *xs = room(&inputs, of->in * s.height * s.width * s.batch + SLACK);
    float *ys = room(&outputs, count);
    float *rs = room(&row, of->in * (of->width * s.batch + SLACK));
    if (!xs || !ys || !rs) {
        given->failed = 1;
        return;
    }
    int64_t weights = of->out * of->in * s.taps, at = client * of->out;
    float *dw = given->dw ? given->dw + at * of->in * s.taps : NULL;
    float *db = given->db ? given->db + at : NULL;
    if (piece) {
        int64_t before = client * (given->pieces - 1) + piece - 1;
        float *part = given->parts + before * (weights + of->out);
        dw = dw ? part : NULL;
        db = db ? part + weights : NULL;
    }
    at = at * s.top_height * s.top_width * of->batch + first;
    memset(ys, 0, 4 * count); /* the zeros around each row */
    gradient_rows(of, &s, lead, line, given->out + at, given->which ? given->which + at : NULL,
                  given->grad + at, ys, db);
    if (dw) {
        take_images(of, &s, given->x + client * of->x_client, first, xs);
        weight_gradient(of, &s, lead, line, xs, ys, dw);
    }
    if (given->dx)
        input_gradient(of, &s, lead, line, ys, rs, given->w + client * of->w_client,
                       given->dx + client * of->in * of->height * of->width * of->batch + first);
}

/* Add what the pieces beyond the first of each client have, in their order. */
static void add_parts(task *given, int64_t weights) {
    int64_t outs = given->of->out;
    const float *part = given->parts;
    for (int64_t k = 0; k < given->of->clients; k++)
        for (int64_t piece = 1; piece < given->pieces; piece++, part += weights + outs) {
            for (int64_t i = 0; given->dw && i < weights; i++)
                given->dw[k * weights + i] += part[i];
            for (int64_t o = 0; given->db && o < outs; o++)
                given->db[k * outs + o] += part[weights + o];
        }
}

/* The gradients of fedgist_convolve, each left out where its pointer is NULL. grad: as out.
   dx: [client][in][row][column][image]; dw and db as the weights, set to zeros by the caller. */
int fedgist_convolve_backward(const layer *of, int64_t threads, const float *x, const float *w,
                              const float *out, const uint8_t *which, const float *grad, float *dx,
                              float *dw, float *db) {
    task all = {.of = of, .x = x, .w = w, .grad = grad, .dx = dx, .dw = dw, .db = db};
    all.out = (float *)out; /* it is only read */
    all.which = (uint8_t *)which;
    int64_t most = images_at_once(of->batch), weights = of->out * of->in * of->rows * of->cols;
    all.pieces = (of->batch + most - 1) / most;
    if (all.pieces > 1) {
        all.parts = calloc(of->clients * (all.pieces - 1) * (weights + of->out), 4);
        if (!all.parts) return 1;
    }
    int failed = in_threads(backward_piece, &all, threads);
    if (!failed) add_parts(&all, weights);
    free(all.parts);
    return failed;
}

/* Numbers of a Hadamard transform that are worked on while they are in the fastest cache. */
#define BLOCK 4096

/* Put sum and difference in place of numbers of x, of n, that are `half` apart. */
static void butterflies(float *x, int64_t n, int64_t half) {
    for (int64_t at = 0; at < n; at += 2 * half)
        for (int64_t i = at; i < at + half; i++) {
            float a = x[i], b = x[i + half];
            x[i] = a + b;
            x[i + half] = a - b;
        }
}

/* The butterflies of half 1, 2, 4 and 8, of n numbers, a multiple of 16. */
static void small_butterflies(float *x, int64_t n) {
    for (float *at = x; at < x + n; at += 16) {
        float some[16];
        memcpy(some, at, sizeof some);
        for (int half = 1; half < 16; half *= 2) butterflies(some, 16, half);
        memcpy(at, some, sizeof some);
    }
}

/* The butterflies of `half` and of twice `half`, a multiple of LANES, with each number read once. */
static void two_butterflies(float *x, int64_t n, int64_t half) {
    for (int64_t at = 0; at < n; at += 4 * half)
        for (float *i = x + at; i < x + at + half; i += LANES) {
            vec a = LOAD(i), b = LOAD(i + half), c = LOAD(i + 2 * half), d = LOAD(i + 3 * half);
            vec add = a + b, sub = a - b, other_add = c + d, other_sub = c - d;
            STORE(i, add + other_add);
            STORE(i + half, sub + other_sub);
            STORE(i + 2 * half, add - other_add);
            STORE(i + 3 * half, sub - other_sub);
        }
}

/* The butterflies from `half`, a multiple of LANES, to n / 2. */
static void large_butterflies(float *x, int64_t n, int64_t half) {
    for (; half * 2 < n; half *= 4) two_butterflies(x, n, half);
    if (half < n) butterflies(x, n, half);
}

/* Replace each of `rows` rows of x by its unscaled Walsh-Hadamard transform; n is a power of two.
   Every butterfly adds and subtracts the same two numbers as torch's operations do, so the bits are
   the same. */
void fedgist_hadamard(int64_t rows, int64_t n, float *x) {
    for (float *end = x + rows * n; x < end; x += n) {
        if (n < 16) {
            for (int64_t half = 1; half < n; half *= 2) butterflies(x, n, half);
            continue;
        }
        int64_t block = SMALLER(n, BLOCK);
        for (int64_t at = 0; at < n; at += block) {
            small_butterflies(x + at, block);
            large_butterflies(x + at, block, 16);
        }
        large_butterflies(x, n, block);
    }
}
