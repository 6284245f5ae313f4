/* Place the W's of rows of F's and B's: see multi/place_weights.py. */

#include "loops.h"

typedef struct {
    const Problem *of;
    const int32_t *given;      /* F's and B's of stage s: given[from[s]] to ... */
    const int64_t *from;
    int32_t *rows;             /* those and W's, from rows_from[s] on */
    const int64_t *rows_from;
    const double *late;
    int64_t *done, *n_arrived, *place, *n_pending, *weights_done, *lengths;
    int32_t *pending;          /* W's in the order of their B's, from from[s] on */
    double *arrived, *free, *held, *slack, *start;
} Draft;

/* The next pass of a stage; -1: none. */
static int64_t choose(Draft *draft, int64_t stage, double now) {
    const Problem *of = draft->of;
    double coming = -1.0;
    int64_t at = draft->from[stage] + draft->place[stage];
    if (at < draft->from[stage + 1]) {
        int64_t q = draft->given[at], i = draft->done[q];
        if (i < draft->n_arrived[q]) {
            double arrival = draft->arrived[q * of->n_microbatches + i];
            if (draft->held[stage] + of->needs[q] > of->limits[stage]) {
                /* only a W can make room */
            } else if (arrival <= now + of->tiny) {
                draft->done[q] = i + 1;
                draft->place[stage]++;
                return q;
            } else {
                coming = arrival;
            }
        }
    }
    int64_t n_done = draft->weights_done[stage];
    if (n_done == draft->n_pending[stage]) return -1;
    int64_t q = draft->pending[draft->from[stage] + n_done];
    double end = now + of->time[q] * (1 - draft->late[stage]);
    if (coming >= 0 && end > coming + of->tiny) return -1;
    draft->weights_done[stage] = n_done + 1;
    return q;
}

static int64_t grow(Draft *draft, Heap *heap) {
    const Problem *of = draft->of;
    int64_t m = of->n_microbatches, n_chunks = of->n_chunks, last = 2 * n_chunks - 1;
    for (int64_t s = 0; s < of->n_stages; s++)
        if (!heap_push(heap, 0.0, s)) return NO_MEMORY;
    while (heap->n) {
        Event event = heap_pop(heap);
        double now = event.time;
        int64_t stage = event.stage;
        if (now < draft->free[stage]) continue;
        int64_t q = choose(draft, stage, now);
        if (q < 0) continue;
        if (draft->start[stage] < 0) draft->start[stage] = now;
        else if ((draft->slack[stage] -= now - draft->free[stage]) < 0) return GIVEN_UP;
        double end = now + of->time[q];
        draft->free[stage] = end;
        draft->held[stage] += of->change[q];
        draft->rows[draft->rows_from[stage] + draft->lengths[stage]++] = (int32_t)q;
        if (!heap_push(heap, end, stage)) return NO_MEMORY;
        if (q > last) continue;
        if (q >= n_chunks && !of->joint[stage])
            draft->pending[draft->from[stage] + draft->n_pending[stage]++] =
                (int32_t)(q + n_chunks);
        if (q == last) continue;
        int64_t target = of->stage[q + 1];
        double arrival = end + of->delay[q];
        draft->arrived[(q + 1) * m + draft->n_arrived[q + 1]++] = arrival;
        if (target != stage && arrival >= draft->free[target]
            && !heap_push(heap, arrival, target)) return NO_MEMORY;
    }
    for (int64_t s = 0; s < of->n_stages; s++)
        if (draft->place[s] < draft->from[s + 1] - draft->from[s]) return GIVEN_UP;
    return DONE;
}

/* Write rows as `zbpp_list_schedule` does. */
ZBPP_API int64_t zbpp_place_weights(const Problem *of, const int32_t *given,
                                    const int64_t *from, const double *late,
                                    double below, int32_t *rows,
                                    const int64_t *rows_from, int64_t *lengths,
                                    double *span) {
    int64_t m = of->n_microbatches, p = of->n_stages, n = 2 * of->n_chunks;
    int64_t result = NO_MEMORY;
    double *floats = calloc((size_t)(n * m + 4 * p), sizeof(double));
    int64_t *whole = calloc((size_t)(2 * n + 3 * p), sizeof(int64_t));
    int32_t *pending = calloc((size_t)from[p], sizeof(int32_t));
    Heap heap = {NULL, 0, 0};
    if (!floats || !whole || !pending) goto end;
    Draft draft = {.of = of, .given = given, .from = from, .late = late};
    draft.rows = rows;
    draft.rows_from = rows_from;
    draft.done = whole;
    draft.n_arrived = whole + n;
    draft.place = draft.n_arrived + n;
    draft.n_pending = draft.place + p;
    draft.weights_done = draft.n_pending + p;
    draft.lengths = lengths;
    draft.pending = pending;
    draft.arrived = floats;
    draft.free = floats + n * m;
    draft.held = draft.free + p;
    draft.slack = draft.held + p;
    draft.start = draft.slack + p;
    draft.n_arrived[0] = m;
    for (int64_t s = 0; s < p; s++) {
        lengths[s] = 0;
        draft.slack[s] = below - of->work[s] - of->tiny;
        draft.start[s] = -1.0;
    }
    result = grow(&draft, &heap);
    if (result == DONE) {
        *span = -INFINITY;
        for (int64_t s = 0; s < p; s++) {
            double one = draft.free[s] - draft.start[s];
            if (one > *span) *span = one;
        }
    }
end:
    free(heap.events);
    free(floats);
    free(whole);
    free(pending);
    return result;
}
