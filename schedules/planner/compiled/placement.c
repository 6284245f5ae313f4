/* The list scheduler of any placement: see multi/list_scheduler.py. */

#include "loops.h"

/* `Settings`; ranks has n_microbatches entries for each F and B number. */
typedef struct {
    const int64_t *caps, *fresh;
    const double *ranks, *shift, *late, *late_tail, *hold, *hold_later;
    double alternate;
} Settings;

/* A pass that is known to come. */
typedef struct {
    double rank, arrival;
    int64_t q;
} Known;

/* The plan as it grows. */
typedef struct {
    const Problem *of;
    int64_t *done, *n_arrived; /* by number */
    double *arrived, *following;
    double *free, *held, *slack, *start, *wake; /* by stage */
    uint8_t *was_forward;
    int64_t **pending, *n_pending, *weights_done, *n_row;
    int32_t **rows;
    Known *known;
} Draft;

static const int64_t *own(const Problem *of, int64_t stage, int64_t *n) {
    *n = of->first[stage + 1] - of->first[stage];
    return of->numbers + of->first[stage];
}

/* See `comes_home` in multi/home.py. */
static int fits_after(const Draft *draft, int64_t stage, int64_t q, double *held) {
    const Problem *of = draft->of;
    if (*held + of->peak[q] > of->limits[stage]) return 0;
    *held += of->change[q];
    return 1;
}

static int comes_home(const Draft *draft, int64_t stage, int64_t forward) {
    const Problem *of = draft->of;
    int64_t n, n_chunks = of->n_chunks;
    const int64_t *mine = own(of, stage, &n);
    double held = draft->held[stage];
    if (!fits_after(draft, stage, forward, &held)) return 0;
    for (int64_t at = draft->weights_done[stage]; at < draft->n_pending[stage]; at++)
        if (!fits_after(draft, stage, draft->pending[stage][at], &held)) return 0;
    int64_t end = draft->done[mine[0]] + (forward == mine[0]);
    for (int64_t i = draft->done[mine[n - 1]]; i < end; i++)
        for (int64_t at = 0; at < n; at++) {
            int64_t q = mine[at];
            if (draft->done[q] + (q == forward) > i) continue;
            if (!fits_after(draft, stage, q, &held)) return 0;
            if (q >= n_chunks && !of->joint[stage]
                && !fits_after(draft, stage, q + n_chunks, &held)) return 0;
        }
    return 1;
}

static double reserve(const Draft *draft, const int64_t *mine, int64_t n,
                      int64_t whole) {
    const double *change = draft->of->change;
    double need = 0.0;
    for (int64_t place = 0; place < n / 2; place++) {
        int64_t forward = mine[place], backward = mine[n - 1 - place];
        if (draft->done[forward] <= whole) need += change[forward];
        need -= change[forward] * (double)(whole - draft->done[backward]);
    }
    return need;
}

static int64_t hold_back(Known *known, int64_t n, const Problem *of, double now,
                         double hold, double hold_later) {
    double soon = now + of->tiny;
    for (int64_t i = 1; i < n; i++) { /* by rank, arrival and number */
        Known one = known[i];
        int64_t at = i;
        for (; at > 0; at--) {
            Known other = known[at - 1];
            if (other.rank < one.rank) break;
            if (other.rank == one.rank
                && (other.arrival < one.arrival
                    || (other.arrival == one.arrival && other.q < one.q))) break;
            known[at] = other;
        }
        known[at] = one;
    }
    for (int64_t i = 0; i < n; i++) {
        Known one = known[i];
        if (one.arrival > soon) continue;
        if (one.q >= of->n_chunks) return one.q;
        double b_from = now + (1 - hold) * of->time[one.q] - of->tiny;
        double f_from = now + (1 - hold_later) * of->time[one.q] - of->tiny;
        int is_held = 0;
        for (int64_t at = 0; at < n && !is_held; at++) {
            Known other = known[at];
            if (other.rank >= one.rank) return one.q;
            double last = other.q >= of->n_chunks ? b_from : f_from;
            is_held = other.q > one.q && soon < other.arrival && other.arrival < last;
        }
        if (!is_held) return one.q;
    }
    return -1;
}

/* The next pass of a stage by rules 1 to 3; -1: none. */
static int64_t choose(Draft *draft, const Settings *settings, int64_t stage,
                      double now) {
    const Problem *of = draft->of;
    const double *change = of->change;
    const int64_t *done = draft->done;
    int64_t m = of->n_microbatches, n_chunks = of->n_chunks, n;
    const int64_t *mine = own(of, stage, &n);
    double soon = now + of->tiny;
    double best = INFINITY, best_coming = INFINITY, soonest = INFINITY, need;
    int64_t chosen = -1, n_known = 0, last = mine[n - 1];
    int64_t back = done[mine[n / 2]];
    int64_t has_weight = draft->weights_done[stage] < draft->n_pending[stage];
    int starved = 0;
    double room = of->forward_limits[stage] - draft->held[stage];
    if (room >= of->ample[stage]) {
        need = -1.0;
    } else if ((double)(back - done[last]) * change[mine[0]]
               >= of->all_forwards[stage]) {
        need = 0.0;
    } else {
        need = reserve(draft, mine, n, back);
        if (!(need > 0.0)) need = 0.0;
    }
    double f_extra = draft->was_forward[stage] ? settings->alternate : 0.0;
    double b_extra = settings->alternate - f_extra;
    for (int64_t place = 0; place < n; place++) {
        int64_t q = mine[place], i = done[q];
        double arrival = draft->following[q], extra;
        if (arrival == INFINITY) continue;
        if (q < n_chunks) {
            if (q == mine[0]
                && (i - done[last] >= settings->caps[stage]
                    || i - back >= settings->fresh[stage])) continue;
            if (need >= 0
                && (change[q] > room || (i == back ? need : need + change[q]) > room)
                && (of->forward_limits[stage] >= 0 || !comes_home(draft, stage, q))) {
                starved |= arrival <= soon;
                continue;
            }
            extra = f_extra;
        } else {
            if (!of->is_plain && draft->held[stage] + of->needs[q] > of->limits[stage]
                && has_weight) {
                starved |= arrival <= soon;
                continue;
            }
            extra = b_extra;
        }
        double rank = settings->ranks[q * m + i];
        if (settings->shift[q] != 0.0) rank += settings->shift[q];
        rank += extra;
        draft->known[n_known++] = (Known){rank, arrival, q};
        if (arrival > soon) {
            if (rank < best_coming) best_coming = rank;
            if (arrival < soonest) soonest = arrival;
        } else if (rank < best) {
            best = rank;
            chosen = q;
        }
    }
    if (0 <= chosen && chosen < n_chunks && best_coming < best)
        chosen = hold_back(draft->known, n_known, of, now, settings->hold[stage],
                           settings->hold_later[stage]);
    if (chosen < 0 && has_weight) {
        int64_t q = draft->pending[stage][draft->weights_done[stage]];
        int tail = done[mine[0]] == m;
        double share = tail ? settings->late_tail[stage] : settings->late[stage];
        if (starved || now + of->time[q] * (1 - share) <= soonest + of->tiny) {
            chosen = q;
            draft->weights_done[stage]++;
        }
    }
    return chosen;
}

/* Run a pass; 0 if there is no memory for an event. */
static int run(Draft *draft, int64_t stage, int64_t q, double now, Heap *heap) {
    const Problem *of = draft->of;
    int64_t m = of->n_microbatches, n_chunks = of->n_chunks, last = 2 * n_chunks - 1;
    double end = now + of->time[q];
    draft->free[stage] = end;
    draft->held[stage] += of->change[q];
    draft->rows[stage][draft->n_row[stage]++] = (int32_t)q;
    draft->wake[stage] = end;
    if (!heap_push(heap, end, stage)) return 0;
    if (q > last) return 1;
    int64_t i = ++draft->done[q];
    draft->following[q] =
        i < draft->n_arrived[q] ? draft->arrived[q * m + i] : INFINITY;
    draft->was_forward[stage] = q < n_chunks;
    if (q >= n_chunks && !of->joint[stage])
        draft->pending[stage][draft->n_pending[stage]++] = q + n_chunks;
    if (q == last) return 1;
    int64_t other = q + 1, target = of->stage[q + 1];
    double arrival = end + of->delay[q];
    draft->arrived[other * m + draft->n_arrived[other]++] = arrival;
    if (draft->following[other] == INFINITY) draft->following[other] = arrival;
    if (draft->free[target] < draft->wake[target] && draft->wake[target] > arrival) {
        draft->wake[target] = arrival; /* asleep */
        return heap_push(heap, arrival, target);
    }
    return 1;
}

static int64_t grow(Draft *draft, const Settings *settings, Heap *heap) {
    const Problem *of = draft->of;
    if (!heap_push(heap, 0.0, of->stage[0])) return NO_MEMORY;
    while (heap->n) {
        Event event = heap_pop(heap);
        int64_t stage = event.stage, n;
        double now = event.time;
        if (draft->wake[stage] != now) continue; /* it was woken earlier */
        int64_t chosen = choose(draft, settings, stage, now);
        if (chosen < 0) { /* rule 4: sleep until something arrives */
            const int64_t *mine = own(of, stage, &n);
            double wake = INFINITY;
            for (int64_t at = 0; at < n; at++) {
                double arrival = draft->following[mine[at]];
                if (arrival > now + of->tiny && arrival < wake) wake = arrival;
            }
            draft->wake[stage] = wake;
            if (wake < INFINITY && !heap_push(heap, wake, stage)) return NO_MEMORY;
            continue;
        }
        if (draft->start[stage] < 0) draft->start[stage] = now;
        else draft->slack[stage] -= now - draft->free[stage];
        if (draft->slack[stage] < 0) return GIVEN_UP;
        if (!run(draft, stage, chosen, now, heap)) return NO_MEMORY;
    }
    return DONE;
}

/* Write the numbers of stage s from rows[rows_from[s]] on, and how many they are. */
ZBPP_API int64_t zbpp_list_schedule(const Problem *of, const Settings *settings,
                                    double below, int32_t *rows,
                                    const int64_t *rows_from, int64_t *lengths,
                                    double *span) {
    int64_t m = of->n_microbatches, p = of->n_stages, n = 2 * of->n_chunks;
    int64_t result = NO_MEMORY;
    double *floats = calloc((size_t)(n * m + n + 5 * p), sizeof(double));
    int64_t *whole = calloc((size_t)(2 * n + 2 * p + n / 2 * m), sizeof(int64_t));
    void **pointers = calloc((size_t)(2 * p), sizeof(void *));
    uint8_t *was_forward = calloc((size_t)p, 1);
    Known *known = calloc((size_t)n, sizeof(Known));
    Heap heap = {NULL, 0, 0};
    Draft draft = {.of = of, .known = known, .was_forward = was_forward};
    if (!floats || !whole || !pointers || !was_forward || !known) goto end;
    draft.arrived = floats;
    draft.following = floats + n * m;
    draft.free = draft.following + n;
    draft.held = draft.free + p;
    draft.slack = draft.held + p;
    draft.start = draft.slack + p;
    draft.wake = draft.start + p;
    draft.done = whole;
    draft.n_arrived = whole + n;
    draft.n_pending = whole + 2 * n;
    draft.weights_done = draft.n_pending + p;
    draft.pending = (int64_t **)pointers;
    draft.rows = (int32_t **)(pointers + p);
    draft.n_row = lengths;
    for (int64_t q = 1; q < n; q++) draft.following[q] = INFINITY;
    draft.n_arrived[0] = m;
    for (int64_t s = 0; s < p; s++) {
        lengths[s] = 0;
        draft.rows[s] = rows + rows_from[s];
        draft.pending[s] = whole + 2 * n + 2 * p + of->first[s] / 2 * m;
        draft.slack[s] = below - of->work[s] - of->tiny;
        draft.start[s] = -1.0;
        draft.wake[s] = s == of->stage[0] ? 0.0 : INFINITY;
    }
    result = grow(&draft, settings, &heap);
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
    free(pointers);
    free(was_forward);
    free(known);
    return result;
}
