/* The list scheduler of a line of stages: see single/list_scheduler.py. */

#include "loops.h"

#ifndef ZBPP_STAMP
#define ZBPP_STAMP ""
#endif

/* Of the sources that this was built of: see library.py. */
const char *zbpp_stamp = ZBPP_STAMP;

enum { F, B, W };

/* `Line`; the rooms have n_microbatches + 1 entries a stage. */
typedef struct {
    int64_t n_stages, n_microbatches;
    double eps;
    const double *f, *b, *w, *hop, *works;
    const int64_t *forward_room, *backward_room;
    const uint8_t *splits;
} Line;

/* `Rules` */
typedef struct {
    const int64_t *ahead, *early;
    const double *late, *slack;
    int64_t is_fair;
} Rules;

/* What is known of a stage while the plan grows. */
typedef struct {
    double *inputs, *gradients; /* when each F's input and each B's gradient arrives */
    int64_t n_inputs, n_gradients, n_f, n_b, n_w, early, n_kinds;
    double free, first, wake, idle, idle_left, late, slack;
    uint8_t *kinds;
} Stage;

static void hand_on(Stage *other, int64_t number, double arrival, Heap *heap, int *ok) {
    if (other->free < other->wake && other->wake > arrival) { /* asleep */
        other->wake = arrival;
        *ok &= heap_push(heap, arrival, number);
    }
}

/* The next kind of a stage by rules 1 to 3; -1: none. */
static int choose(const Line *line, const Rules *rules, Stage *stage, int64_t s,
                  double t, double most_idle, double *next_f, double *next_b) {
    int64_t i = stage->n_f, j = stage->n_b, k = stage->n_w;
    int64_t width = line->n_microbatches + 1;
    double eps = line->eps;
    *next_f = i < stage->n_inputs ? stage->inputs[i] : INFINITY;
    *next_b = j < stage->n_gradients ? stage->gradients[j] : INFINITY;
    int room = j - k <= line->forward_room[s * width + i - j];
    int f_ready = *next_f <= t;
    if (f_ready && room
        && (i - j < rules->ahead[s]
            || (t < *next_b && t + line->f[s] <= *next_b + eps))) return F;
    if (f_ready && room && stage->early > 0) {
        stage->early--;
        return F;
    }
    if (*next_b <= t && j - k <= line->backward_room[s * width + i - j]) return B;
    if (j <= k) return -1;
    double horizon = f_ready || !room || *next_b < *next_f ? *next_b : *next_f;
    double over = t + line->w[s] - horizon;
    if (over <= eps || (f_ready && !room) || *next_b <= t) return W;
    if (over <= stage->late && over <= stage->slack) {
        stage->slack -= over;
        return W;
    }
    return stage->idle + horizon - t > most_idle ? W : -1;
}

/* Run a kind, and tell the neighbours when what it sends arrives; its end. */
static double run(const Line *line, Stage *stages, int64_t s, int kind, double t,
                  Heap *heap, int *ok) {
    Stage *stage = &stages[s];
    int64_t last = line->n_stages - 1;
    double end;
    stage->kinds[stage->n_kinds++] = (uint8_t)kind;
    if (kind == F) {
        stage->n_f++;
        end = t + line->f[s];
        if (s == last) {
            stage->gradients[stage->n_gradients++] = end;
        } else {
            Stage *other = &stages[s + 1];
            other->inputs[other->n_inputs++] = end + line->hop[s];
            hand_on(other, s + 1, end + line->hop[s], heap, ok);
        }
    } else if (kind == B) {
        stage->n_b++;
        end = t + line->b[s];
        if (!line->splits[s]) stage->n_w = stage->n_b;
        if (s > 0) {
            Stage *other = &stages[s - 1];
            other->gradients[other->n_gradients++] = end + line->hop[s - 1];
            hand_on(other, s - 1, end + line->hop[s - 1], heap, ok);
        }
    } else {
        stage->n_w++;
        end = t + line->w[s];
    }
    stage->free = end;
    return end;
}

/* Write the kinds of stage s from kinds[3 m s] on; the span, and the passes placed. */
ZBPP_API int64_t zbpp_line(const Line *line, const Rules *rules, double cut,
                           uint8_t *kinds, int64_t *lengths, double *span,
                           int64_t *n_steps) {
    int64_t p = line->n_stages, m = line->n_microbatches;
    double most_idle = rules->is_fair ? -INFINITY : INFINITY;
    Stage *stages = calloc((size_t)p, sizeof(Stage));
    double *arrivals = calloc((size_t)(2 * p * m), sizeof(double));
    Heap heap = {NULL, 0, 0};
    int64_t result = NO_MEMORY;
    int ok = 1;
    *n_steps = 0;
    if (stages == NULL || arrivals == NULL) goto end;
    for (int64_t s = 0; s < p; s++) {
        Stage *stage = &stages[s];
        stage->inputs = arrivals + 2 * s * m;
        stage->gradients = stage->inputs + m;
        stage->n_inputs = s ? 0 : m; /* stage 0: all there at 0 */
        stage->wake = s ? INFINITY : 0.0;
        stage->early = rules->early[s];
        stage->idle_left = cut - line->works[s] + line->eps;
        stage->late = rules->late[s] * line->w[s];
        stage->slack = rules->slack[s];
        stage->kinds = kinds + 3 * m * s;
    }
    ok = heap_push(&heap, 0.0, 0);
    while (ok && heap.n) {
        Event event = heap_pop(&heap);
        int64_t s = event.stage;
        Stage *stage = &stages[s];
        if (stage->wake != event.time) continue; /* it was woken earlier */
        double t = event.time, next_f, next_b;
        int kind = choose(line, rules, stage, s, t, most_idle, &next_f, &next_b);
        if (kind < 0) { /* rule 4: sleep until something arrives */
            stage->wake = next_f <= t || next_b < next_f ? next_b : next_f;
            if (stage->wake < INFINITY) ok = heap_push(&heap, stage->wake, s);
            continue;
        }
        if (t > stage->free) {
            if (stage->n_f) {
                stage->idle += t - stage->free;
                if (stage->idle > most_idle) most_idle = stage->idle;
                if (stage->idle > stage->idle_left) {
                    result = GIVEN_UP;
                    goto end;
                }
            } else {
                stage->first = t;
            }
        }
        ++*n_steps;
        double end = run(line, stages, s, kind, t, &heap, &ok);
        stage->wake = stage->n_w == m ? INFINITY : end;
        if (stage->wake < INFINITY) ok &= heap_push(&heap, end, s);
    }
    if (!ok) goto end;
    *span = -INFINITY;
    for (int64_t s = 0; s < p; s++) {
        lengths[s] = stages[s].n_kinds;
        double one = stages[s].free - stages[s].first;
        if (one > *span) *span = one;
    }
    result = DONE;
end:
    free(heap.events);
    free(arrivals);
    free(stages);
    return result;
}

/* Given orders: `time_orders` of single/problem.py. */
typedef struct {
    int64_t n_stages, n_microbatches;
    const double *f, *b, *w, *hop;
    const double *change, *inside; /* of memory, by stage and kind */
    const double *most;
} Orders;

static int fits(const Orders *of, int64_t s, const uint8_t *row, int64_t n) {
    const double *change = of->change + 3 * s, *inside = of->inside + 3 * s;
    double held = 0.0, peak = 0.0;
    for (int64_t at = 0; at < n; at++) {
        if (held + inside[row[at]] > peak) peak = held + inside[row[at]];
        held += change[row[at]];
    }
    return !(peak > of->most[s]);
}

/* Where a stage stands, and what has arrived there. */
typedef struct {
    double *arrived[2], free, first;
    int64_t n_arrived[2], n_done[2], at;
    const uint8_t *row;
    int is_waiting; /* to be visited */
} Place;

static void arrive(Place *place, int kind, double when) {
    place->arrived[kind][place->n_arrived[kind]++] = when;
}

/* Go on until an input is missing; true if it went on at all. */
static int go_on(const Orders *of, Place *places, int64_t s, int64_t length) {
    Place *here = &places[s];
    int64_t before = here->at;
    double t = here->free;
    for (; here->at < length; here->at++) {
        int kind = here->row[here->at];
        if (kind == W) {
            t += of->w[s];
            continue;
        }
        int64_t i = here->n_done[kind];
        if (i >= here->n_arrived[kind]) break;
        if (here->arrived[kind][i] > t) t = here->arrived[kind][i];
        here->n_done[kind]++;
        if (kind == F) {
            if (i == 0) here->first = t;
            t += of->f[s];
            if (s < of->n_stages - 1) arrive(here + 1, F, t + of->hop[s]);
            else arrive(here, B, t);
        } else {
            t += of->b[s];
            if (s > 0) arrive(here - 1, B, t + of->hop[s - 1]);
        }
    }
    here->free = t;
    return here->at > before;
}

/* The span of rows of kinds, one after the other; gives up where stages wait for one
   another, or hold too much. */
ZBPP_API int64_t zbpp_time_orders(const Orders *of, const uint8_t *kinds,
                                  const int64_t *lengths, double *span) {
    int64_t p = of->n_stages, m = of->n_microbatches, n = p, result = NO_MEMORY;
    Place *places = calloc((size_t)p, sizeof(Place));
    double *arrivals = calloc((size_t)(2 * p * m), sizeof(double));
    int64_t *to_try = calloc((size_t)p, sizeof(int64_t));
    if (places == NULL || arrivals == NULL || to_try == NULL) goto end;
    result = GIVEN_UP;
    for (int64_t s = 0; s < p; s++) {
        if (!fits(of, s, kinds, lengths[s])) goto end;
        places[s].row = kinds;
        places[s].first = INFINITY;
        places[s].arrived[F] = arrivals + 2 * s * m;
        places[s].arrived[B] = places[s].arrived[F] + m;
        places[s].is_waiting = 1;
        to_try[p - 1 - s] = s;
        kinds += lengths[s];
    }
    places[0].n_arrived[F] = m; /* all there at 0 */
    while (n) {
        int64_t s = to_try[--n];
        places[s].is_waiting = 0;
        if (!go_on(of, places, s, lengths[s])) continue;
        for (int64_t other = s - 1; other <= s + 1; other += 2) {
            if (other < 0 || other >= p || places[other].is_waiting) continue;
            places[other].is_waiting = 1;
            to_try[n++] = other;
        }
    }
    *span = -INFINITY;
    for (int64_t s = 0; s < p; s++) {
        if (places[s].at < lengths[s]) goto end;
        double one = places[s].free - places[s].first;
        if (one > *span) *span = one;
    }
    result = DONE;
end:
    free(to_try);
    free(arrivals);
    free(places);
    return result;
}
