/* All steps of a recurrent layer, for some records, forward and back.

   recurrent_steps.py calls this on plain memory; nothing of Python or PyTorch is used. A record's
   numbers are made of its own rows alone, in one order: an entry of a product is one chain of
   multiplications and additions, whichever records are computed beside it. */

#include "../vectors.h"

typedef int32_t i8 __attribute__((vector_size(32), aligned(4)));
typedef int32_t i16 __attribute__((vector_size(64), aligned(4)));

enum { PANEL = 32 };

/* One row for each record, so many floats apart. */
typedef struct {
    const float *rows;
    int64_t stride;
} Rows;

/* As recurrent_steps.py writes it. Strides are of records and of steps, in floats; what has none
   is dense. Weights lie in panels of 32 outputs, of each input one after the other. */
typedef struct {
    int64_t records, steps, inputs, states, reverse, level;
    const float *x;
    int64_t x_stride, x_step;
    /* of inputs and then states to gates; of a GRU to its first two, and apart to the third */
    const float *weights, *bias, *third_of_x, *bias_of_x, *third_of_h, *bias_of_h; /* or no bias */
    const float *to_states, *to_inputs; /* back, from all gates; no gradients of inputs: NULL */
    float *gates;                       /* (records, steps, 4 states) */
    float *outputs, *cells;             /* (records, steps + 1, states); GRU: no cells */
    const float *from_outputs;          /* gradients */
    int64_t from_stride, from_step;
    float *dh, *dc; /* gradients of the last states, and then of the first ones */
    float *deltas, *deltas_of_h, *dx; /* (records, steps, gates or inputs); of_h: of a GRU */
} Run;

/* R rows of start + first @ W[:k] + second @ W[k:], in so many columns of one panel. */
#define TILE(NAME, TARGET, VECTOR, R)                                                              \
    TARGET static void NAME(Rows first, int64_t k, Rows second, int64_t l, const float *w,         \
                            Rows start, float *out, int64_t stride, int64_t columns) {             \
        enum { LANES = sizeof(VECTOR) / sizeof(float) };                                           \
        float room[2 * LANES];                                                                     \
        VECTOR sum[R][2];                                                                          \
        memset(room, 0, sizeof room);                                                              \
        for (int r = 0; r < R; r++) {                                                              \
            const float *from = start.rows + r * start.stride;                                     \
            if (start.rows && columns < 2 * LANES) memcpy(room, from, sizeof(float) * columns);    \
            if (!start.rows || columns < 2 * LANES) from = room;                                   \
            for (int v = 0; v < 2; v++) sum[r][v] = *(const VECTOR *)(from + v * LANES);           \
        }                                                                                          \
        for (int part = 0; part < 2; part++) {                                                     \
            const float *a = part ? second.rows : first.rows, *end = a + (part ? l : k);           \
            int64_t s = part ? second.stride : first.stride;                                       \
            const float *b = a + R / 2 * s;                                                        \
            for (; a < end; a++, b++, w += PANEL) {                                                \
                VECTOR left = *(const VECTOR *)w, right = *(const VECTOR *)(w + LANES);            \
                for (int r = 0; r < R; r++) {                                                      \
                    float of_row = r < R / 2 ? a[r * s] : b[(r - R / 2) * s];                      \
                    sum[r][0] += of_row * left;                                                    \
                    sum[r][1] += of_row * right;                                                   \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
        for (int r = 0; r < R; r++, out += stride) {                                               \
            float *to = columns < 2 * LANES ? room : out;                                          \
            for (int v = 0; v < 2; v++) *(VECTOR *)(to + v * LANES) = sum[r][v];                   \
            if (to != out) memcpy(out, room, sizeof(float) * columns);                             \
        }                                                                                          \
    }
TILE(wide_8, WIDE, v16, 8)
TILE(wide_1, WIDE, v16, 1)
TILE(middle_4, MIDDLE, v8, 4)
TILE(middle_1, MIDDLE, v8, 1)

static Rows at(Rows of, int64_t row, int64_t column) {
    return (Rows){of.rows ? of.rows + row * of.stride + column : of.rows, of.stride};
}

/* out = start + first @ W[:k] + second @ W[k:], a row for each record; no start: zeros. */
static void multiply(const Run *of, Rows first, int64_t k, Rows second, int64_t l, const float *w,
                     Rows start, float *out, int64_t stride, int64_t columns) {
    int64_t width = of->level == WIDE_LEVEL ? 32 : 16, most = of->level == WIDE_LEVEL ? 8 : 4;
    for (int64_t from = 0; from < columns; from += width) {
        const float *panel = w + from / PANEL * PANEL * (k + l) + from % PANEL;
        int64_t here = columns - from < width ? columns - from : width;
        for (int64_t row = 0, rows; row < of->records; row += rows) {
            rows = of->records - row >= most ? most : 1;
            (of->level == WIDE_LEVEL ? rows == 1 ? wide_1 : wide_8 : rows == 1 ? middle_1 : middle_4)(
                at(first, row, 0), k, at(second, row, 0), l, panel, at(start, row, from),
                out + row * stride + from, stride, here);
        }
    }
}

/* Where the mask is set, one, and elsewhere the other; of integers. */
#define CHOOSE(mask, one, other) (((mask) & (one)) | (~(mask) & (other)))

/* Bent values, as vectors; NaN stays NaN.

   e^x by x = n ln 2 + r and a polynomial in r, tanh x near zero by one in x^2 (both from S. Moshier's
   Cephes library): within 4 units in the last place. */
#define BENT(VECTOR, INTS, OF, TARGET)                                                             \
    TARGET static inline VECTOR exp_##OF(VECTOR x) {                                               \
        VECTOR low = (VECTOR){0} - 86.0f, high = (VECTOR){0} + 88.0f;                              \
        x = (VECTOR)CHOOSE((INTS)(x < low), (INTS)low, (INTS)x);                                   \
        x = (VECTOR)CHOOSE((INTS)(x > high), (INTS)high, (INTS)x);                                 \
        VECTOR shifted = x * 1.44269504088896341f + 12582912.0f, n = shifted - 12582912.0f;        \
        VECTOR r = x - n * 0.693359375f;                                                           \
        r = r + n * 2.12194440e-4f;                                                                \
        VECTOR p = r * 1.9875691500e-4f + 1.3981999507e-3f;                                        \
        p = p * r + 8.3334519073e-3f;                                                              \
        p = p * r + 4.1665795894e-2f;                                                              \
        p = p * r + 1.6666665459e-1f;                                                              \
        p = p * r + 5.0000001201e-1f;                                                              \
        p = p * (r * r) + r + 1.0f;                                                                \
        return p * (VECTOR)(((INTS)shifted << 23) + 0x3f800000); /* 2^n */                         \
    }                                                                                              \
    TARGET static inline VECTOR sigmoid_##OF(VECTOR x) { return 1.0f / (1.0f + exp_##OF(-x)); }    \
    TARGET static inline VECTOR tanh_##OF(VECTOR x) {                                              \
        INTS sign = (INTS)x & (int32_t)0x80000000;                                                 \
        VECTOR size = (VECTOR)((INTS)x & 0x7fffffff), square = x * x;                              \
        VECTOR p = square * -5.70498872745e-3f + 2.06390887954e-2f;                                \
        p = p * square - 5.37397155531e-2f;                                                        \
        p = p * square + 1.33314422036e-1f;                                                        \
        p = p * square - 3.33332819422e-1f;                                                        \
        p = p * square * x + x;                                                                    \
        VECTOR far = 1.0f - 2.0f / (exp_##OF(size + size) + 1.0f);                                 \
        INTS near = (INTS)(size < (VECTOR){0} + 0.625f);                                           \
        return (VECTOR)CHOOSE(near, (INTS)p, (INTS)far | sign);                                    \
    }
BENT(v8, i8, middle, MIDDLE)
BENT(v16, i16, wide, WIDE)

/* For the units from `u` on, of which the last are filled up with zeros. */
#define READ(VECTOR, of)                                                                           \
    ({                                                                                             \
        VECTOR some = {0};                                                                         \
        if (left >= LANES) some = *(const VECTOR *)((of) + u);                                     \
        else memcpy(&some, (of) + u, sizeof(float) * left);                                        \
        some;                                                                                      \
    })
#define WRITE(VECTOR, of, value)                                                                   \
    do {                                                                                           \
        VECTOR some = value;                                                                       \
        if (left >= LANES) *(VECTOR *)((of) + u) = some;                                           \
        else memcpy((of) + u, &some, sizeof(float) * left);                                        \
    } while (0)

/* One record's step of an LSTM: gates i, f, g, o from what they are bent of. */
#define LSTM(VECTOR, OF, TARGET)                                                                   \
    TARGET static void lstm_step_##OF(int64_t units, float *gates, const float *before,            \
                                      float *cell, float *output) {                                \
        enum { LANES = sizeof(VECTOR) / sizeof(float) };                                           \
        for (int64_t u = 0, left = units; u < units; u += LANES, left -= LANES) {                  \
            VECTOR i = sigmoid_##OF(READ(VECTOR, gates));                                          \
            VECTOR f = sigmoid_##OF(READ(VECTOR, gates + units));                                  \
            VECTOR g = tanh_##OF(READ(VECTOR, gates + 2 * units));                                 \
            VECTOR o = sigmoid_##OF(READ(VECTOR, gates + 3 * units));                              \
            VECTOR c = f * READ(VECTOR, before) + i * g;                                           \
            WRITE(VECTOR, gates, i);                                                               \
            WRITE(VECTOR, gates + units, f);                                                       \
            WRITE(VECTOR, gates + 2 * units, g);                                                   \
            WRITE(VECTOR, gates + 3 * units, o);                                                   \
            WRITE(VECTOR, cell, c);                                                                \
            WRITE(VECTOR, output, o * tanh_##OF(c));                                               \
        }                                                                                          \
    }                                                                                              \
    TARGET static void lstm_back_##OF(int64_t units, const float *gates, const float *before,      \
                                      const float *cell, const float *from_output,                 \
                                      const float *dh, float *dc, float *delta) {                  \
        enum { LANES = sizeof(VECTOR) / sizeof(float) };                                           \
        for (int64_t u = 0, left = units; u < units; u += LANES, left -= LANES) {                  \
            VECTOR i = READ(VECTOR, gates), f = READ(VECTOR, gates + units);                       \
            VECTOR g = READ(VECTOR, gates + 2 * units), o = READ(VECTOR, gates + 3 * units);       \
            VECTOR bent = tanh_##OF(READ(VECTOR, cell));                                           \
            VECTOR slope = READ(VECTOR, dh) + READ(VECTOR, from_output);                           \
            VECTOR of_cell = READ(VECTOR, dc) + slope * o * (1.0f - bent * bent);                  \
            WRITE(VECTOR, delta, of_cell * g * i * (1.0f - i));                                    \
            WRITE(VECTOR, delta + units, of_cell * READ(VECTOR, before) * f * (1.0f - f));         \
            WRITE(VECTOR, delta + 2 * units, of_cell * i * (1.0f - g * g));                        \
            WRITE(VECTOR, delta + 3 * units, slope * bent * o * (1.0f - o));                       \
            WRITE(VECTOR, dc, of_cell *f);                                                         \
        }                                                                                          \
    }
LSTM(v8, middle, MIDDLE)
LSTM(v16, wide, WIDE)

/* One record's step of a GRU: its gates r, z and n, and what n has of the state, from what they
   are bent of. */
#define GRU(VECTOR, OF, TARGET)                                                                    \
    TARGET static void gru_step_##OF(int64_t units, float *gates, const float *before,             \
                                     float *output) {                                              \
        enum { LANES = sizeof(VECTOR) / sizeof(float) };                                           \
        for (int64_t u = 0, left = units; u < units; u += LANES, left -= LANES) {                  \
            VECTOR r = sigmoid_##OF(READ(VECTOR, gates));                                          \
            VECTOR z = sigmoid_##OF(READ(VECTOR, gates + units));                                  \
            VECTOR bent = READ(VECTOR, gates + 2 * units) + r * READ(VECTOR, gates + 3 * units);   \
            VECTOR n = tanh_##OF(bent);                                                            \
            WRITE(VECTOR, gates, r);                                                               \
            WRITE(VECTOR, gates + units, z);                                                       \
            WRITE(VECTOR, gates + 2 * units, n);                                                   \
            WRITE(VECTOR, output, n + z * (READ(VECTOR, before) - n));                             \
        }                                                                                          \
    }                                                                                              \
    TARGET static void gru_back_##OF(int64_t units, const float *gates, const float *before,       \
                                     const float *from_output, float *dh, float *delta,            \
                                     float *delta_of_h) {                                          \
        enum { LANES = sizeof(VECTOR) / sizeof(float) };                                           \
        for (int64_t u = 0, left = units; u < units; u += LANES, left -= LANES) {                  \
            VECTOR r = READ(VECTOR, gates), z = READ(VECTOR, gates + units);                       \
            VECTOR n = READ(VECTOR, gates + 2 * units), of_state = READ(VECTOR, gates + 3 * units); \
            VECTOR slope = READ(VECTOR, dh) + READ(VECTOR, from_output);                           \
            VECTOR of_n = slope * (1.0f - z) * (1.0f - n * n);                                     \
            VECTOR of_r = of_n * of_state * r * (1.0f - r);                                        \
            VECTOR of_z = slope * (READ(VECTOR, before) - n) * z * (1.0f - z);                     \
            WRITE(VECTOR, delta, of_r);                                                            \
            WRITE(VECTOR, delta + units, of_z);                                                    \
            WRITE(VECTOR, delta + 2 * units, of_n);                                                \
            WRITE(VECTOR, delta_of_h, of_r);                                                       \
            WRITE(VECTOR, delta_of_h + units, of_z);                                               \
            WRITE(VECTOR, delta_of_h + 2 * units, of_n *r);                                        \
            WRITE(VECTOR, dh, slope *z);                                                           \
        }                                                                                          \
    }
GRU(v8, middle, MIDDLE)
GRU(v16, wide, WIDE)

/* The step that is the n-th to be run. */
static int64_t place(const Run *of, int64_t n) { return of->reverse ? of->steps - 1 - n : n; }

/* States of all records before step t, and after it. */
static Rows before(const Run *of, const float *states, int64_t t) {
    return (Rows){states + (t + of->reverse) * of->states, (of->steps + 1) * of->states};
}

static float *after(const Run *of, float *states, int64_t record, int64_t t) {
    return states + (record * (of->steps + 1) + t + 1 - of->reverse) * of->states;
}

static const Rows NOTHING = {0, 0};

void dpoptim_lstm_forward(const Run *of) {
    int64_t units = of->states, gates = 4 * units, stride = of->steps * gates;
    Rows bias = {of->bias, 0};
    for (int64_t n = 0; n < of->steps; n++) {
        int64_t t = place(of, n);
        Rows x = {of->x + t * of->x_step, of->x_stride};
        multiply(of, x, of->inputs, before(of, of->outputs, t), units, of->weights, bias,
                 of->gates + t * gates, stride, gates);
        for (int64_t record = 0; record < of->records; record++)
            (of->level == WIDE_LEVEL ? lstm_step_wide : lstm_step_middle)(
                units, of->gates + record * stride + t * gates,
                at(before(of, of->cells, t), record, 0).rows, after(of, of->cells, record, t),
                after(of, of->outputs, record, t));
    }
}

void dpoptim_lstm_backward(const Run *of) {
    int64_t units = of->states, gates = 4 * units, stride = of->steps * gates;
    for (int64_t n = of->steps; n-- > 0;) {
        int64_t t = place(of, n);
        for (int64_t record = 0; record < of->records; record++)
            (of->level == WIDE_LEVEL ? lstm_back_wide : lstm_back_middle)(
                units, of->gates + record * stride + t * gates,
                at(before(of, of->cells, t), record, 0).rows, after(of, of->cells, record, t),
                of->from_outputs + record * of->from_stride + t * of->from_step,
                of->dh + record * units, of->dc + record * units,
                of->deltas + record * stride + t * gates);
        Rows deltas = {of->deltas + t * gates, stride};
        multiply(of, deltas, gates, NOTHING, 0, of->to_states, NOTHING, of->dh, units, units);
        if (of->dx)
            multiply(of, deltas, gates, NOTHING, 0, of->to_inputs, NOTHING,
                     of->dx + t * of->inputs, of->steps * of->inputs, of->inputs);
    }
}

void dpoptim_gru_forward(const Run *of) {
    int64_t units = of->states, stride = of->steps * 4 * units;
    Rows bias = {of->bias, 0}, bias_of_x = {of->bias_of_x, 0}, bias_of_h = {of->bias_of_h, 0};
    for (int64_t n = 0; n < of->steps; n++) {
        int64_t t = place(of, n);
        float *gates = of->gates + t * 4 * units;
        Rows x = {of->x + t * of->x_step, of->x_stride}, h = before(of, of->outputs, t);
        multiply(of, x, of->inputs, h, units, of->weights, bias, gates, stride, 2 * units);
        multiply(of, x, of->inputs, NOTHING, 0, of->third_of_x, bias_of_x, gates + 2 * units,
                 stride, units);
        multiply(of, h, units, NOTHING, 0, of->third_of_h, bias_of_h, gates + 3 * units, stride,
                 units);
        for (int64_t record = 0; record < of->records; record++)
            (of->level == WIDE_LEVEL ? gru_step_wide : gru_step_middle)(
                units, gates + record * stride, at(h, record, 0).rows,
                after(of, of->outputs, record, t));
    }
}

void dpoptim_gru_backward(const Run *of) {
    int64_t units = of->states, gates = 3 * units, stride = of->steps * gates;
    for (int64_t n = of->steps; n-- > 0;) {
        int64_t t = place(of, n);
        for (int64_t record = 0; record < of->records; record++)
            (of->level == WIDE_LEVEL ? gru_back_wide : gru_back_middle)(
                units, of->gates + (record * of->steps + t) * 4 * units,
                at(before(of, of->outputs, t), record, 0).rows,
                of->from_outputs + record * of->from_stride + t * of->from_step,
                of->dh + record * units, of->deltas + record * stride + t * gates,
                of->deltas_of_h + record * stride + t * gates);
        Rows deltas = {of->deltas + t * gates, stride}, kept = {of->dh, units};
        Rows of_states = {of->deltas_of_h + t * gates, stride};
        multiply(of, of_states, gates, NOTHING, 0, of->to_states, kept, of->dh, units, units);
        if (of->dx)
            multiply(of, deltas, gates, NOTHING, 0, of->to_inputs, NOTHING,
                     of->dx + t * of->inputs, of->steps * of->inputs, of->inputs);
    }
}
