/* Layers whose norms are claimed by the Gram form: all of a pass measured in one call, and added to
   their totals in another. */

#include "../vectors.h"

/* As claimed_layers.py writes it: g (records, positions, rows) and a (records, positions, columns),
   with steps from one record to the next and from one position to the next. */
typedef struct {
    const float *g, *a;
    int64_t positions, rows, columns, g_stride, g_step, a_stride, a_step;
    double *found;        /* as `dpoptim_ghost_norms` writes it, (records, 3) */
    float *total;         /* that is added to, (rows, columns) */
    const float *weights; /* of the records that are added */
    int64_t piece;        /* rows that are measured together where they are added */
    double *squares;      /* of each piece, (pieces, records that are added) */
    double *columns_of;   /* room for 2 * FILL numbers of each piece */
} Layer;

/* Records, and those of them that are added, from one on. */
typedef struct {
    int64_t count, records, from, some, level;
    Layer layers[];
} Layers;

void dpoptim_ghost_norms(int64_t records, int64_t positions, int64_t rows, int64_t columns,
                         const float *g, int64_t g_stride, int64_t g_step, const float *a,
                         int64_t a_stride, int64_t a_step, double *out, int level);
void dpoptim_add_outer(int64_t records, int64_t positions, int64_t rows, int64_t columns,
                       const float *g, int64_t g_stride, int64_t g_step, const float *a,
                       int64_t a_stride, int64_t a_step, float *total, const float *weights,
                       int64_t piece, double *squares, double *columns_of, float *room, int level);

/* Claims norms of one of several parts of the records, in all layers. */
void dpoptim_claim_layers(const void *given, int64_t part, int64_t parts, float *room) {
    (void)room;
    const Layers *what = given;
    int64_t first = what->records * part / parts, end = what->records * (part + 1) / parts;
    for (const Layer *of = what->layers; of < what->layers + what->count; of++)
        dpoptim_ghost_norms(end - first, of->positions, of->rows, of->columns,
                            of->g + first * of->g_stride, of->g_stride, of->g_step,
                            of->a + first * of->a_stride, of->a_stride, of->a_step,
                            of->found + 3 * first, (int)what->level);
}

/* Multiplications for a piece of a layer. */
static double work_of(const Layer *of) {
    return (double)of->piece * of->columns * of->positions;
}

static int64_t pieces_of(const Layer *of) { return (of->rows + of->piece - 1) / of->piece; }

/* Adds one of several parts of all layers' pieces, about as much work as another. */
void dpoptim_add_layers(const void *given, int64_t part, int64_t parts, float *room) {
    const Layers *what = given;
    const Layer *end = what->layers + what->count;
    double all = 0.0, before = 0.0;
    for (const Layer *of = what->layers; of < end; of++) all += work_of(of) * pieces_of(of);
    double from = all * part / parts, upto = part + 1 < parts ? all * (part + 1) / parts : all + 1.0;
    for (const Layer *of = what->layers; of < end; of++) {
        int64_t pieces = pieces_of(of), first = pieces, some = 0;
        for (int64_t k = 0; k < pieces; k++, before += work_of(of))
            if (before >= from && before < upto) {
                first = k < first ? k : first;
                some++;
            }
        if (some == 0) continue;
        int64_t row = first * of->piece, rows = some * of->piece;
        rows = row + rows < of->rows ? rows : of->rows - row;
        dpoptim_add_outer(what->some, of->positions, rows, of->columns,
                          of->g + what->from * of->g_stride + row, of->g_stride, of->g_step,
                          of->a + what->from * of->a_stride, of->a_stride, of->a_step,
                          of->total + row * of->columns, of->weights, of->piece,
                          of->squares + first * what->some, of->columns_of + first * 2 * FILL, room,
                          (int)what->level);
    }
}
