/* The list scheduler for two lanes; lanes/scheduler.py explains its rules. */

#include "loops.h"

enum { COMPUTE = 0, NETWORK = 1, LANES = 2 };
enum { MOST_FLIGHTS = 64 }; /* and above: a number to begin */

typedef struct {
    int64_t n_microbatches, n_chunks, n_stages;
    double round; /* time of a micro-batch on the busiest lane */
    const int64_t *first;  /* 3C + 1: the first part of each number */
    const int64_t *lane;   /* by part */
    const double *time;    /* by part */
    const int64_t *source; /* by part: of W, the part of B that it needs */
    const double *delay, *change;
    const int64_t *stage;
    const int64_t *held, *held_from; /* numbers of F's and B's by stage */
    const double *room; /* by stage: what may be held after an F */
} Lanes;

typedef struct {
    const double *rank;  /* 2C */
    const int64_t *cap, *most_f, *most_b, *most_w; /* by stage */
    const double *tolerance, *tail;       /* by stage */
    double go_on;
    int64_t most; /* F's and B's at once */
} LaneRules;

typedef struct {
    int64_t number, microbatch, part;
    double ready;
} Flight;

/* Parts in the order of their starts: `parts` by their index among all parts, and
   `microbatches`; each stage has a row of n_row entries from row_from on. Returns the
   largest span in `span`. GIVEN_UP where a stage's idle time rules out `best`. */
ZBPP_API int64_t zbpp_schedule_lanes(
    const Lanes *p, const LaneRules *r, double best, const int64_t *row_from,
    int64_t *parts, int64_t *microbatches, double *span) {
    const int64_t C = p->n_chunks, m = p->n_microbatches, S = p->n_stages;
    const int64_t n_parts = p->first[3 * C];
    double *ends = malloc((size_t)(2 * C * m) * sizeof(double));
    double *sources = malloc((size_t)(n_parts * m) * sizeof(double));
    int64_t *started = calloc((size_t)(3 * C), sizeof(int64_t));
    int64_t *w_part = calloc((size_t)(3 * C), sizeof(int64_t));
    double *w_ready = calloc((size_t)(3 * C), sizeof(double));
    double *free_at = calloc((size_t)(LANES * S), sizeof(double));
    double *begun = malloc((size_t)S * sizeof(double));
    double *idle = calloc((size_t)S, sizeof(double));
    double *work = calloc((size_t)S, sizeof(double));
    double *memory = calloc((size_t)S, sizeof(double));
    double *last_end = calloc((size_t)S, sizeof(double));
    int64_t *n_row = calloc((size_t)S, sizeof(int64_t));
    int64_t *n_flying = calloc((size_t)(4 * S), sizeof(int64_t));
    Flight *flights = malloc((size_t)(S * MOST_FLIGHTS) * sizeof(Flight));
    Heap heap = {NULL, 0, 0};
    int64_t result = NO_MEMORY;
    if (!ends || !sources || !started || !w_part || !w_ready || !free_at || !begun
        || !idle || !work || !memory || !last_end || !n_row || !n_flying || !flights)
        goto out;
    for (int64_t k = 0; k < 2 * C * m; k++) ends[k] = INFINITY;
    for (int64_t k = 0; k < n_parts * m; k++) sources[k] = INFINITY;
    for (int64_t s = 0; s < S; s++) {
        begun[s] = -1.0;
        if (!heap_push(&heap, 0.0, s)) goto out;
    }
    for (int64_t q = 0; q < 3 * C; q++)
        for (int64_t k = p->first[q]; k < p->first[q + 1]; k++)
            if (p->lane[k] == COMPUTE) work[p->stage[q]] += (double)m * p->time[k];
    while (heap.n > 0) {
        Event event = heap_pop(&heap);
        const double now = event.time;
        const int64_t s = event.stage;
        Flight *mine = flights + s * MOST_FLIGHTS;
        int64_t *flying = n_flying + 4 * s; /* all, F's, B's; W's pending */
        /* drop what has ended */
        int64_t kept = 0;
        for (int64_t k = 0; k < flying[0]; k++) {
            Flight one = mine[k];
            if (one.part == p->first[one.number + 1] && one.ready <= now) {
                if (one.number < C) flying[1]--;
                else {
                    flying[2]--;
                    memory[s] += p->change[one.number];
                    flying[3]++;
                }
            } else mine[kept++] = one;
        }
        flying[0] = kept;
        const int64_t from = p->held_from[s], to = p->held_from[s + 1];
        const int64_t first_f = p->held[from], last_b = p->held[to - 1];
        const int64_t last_f = p->held[from + (to - from) / 2 - 1];
        for (int64_t q = from + (to - from) / 2; q < to; q++) {
            int64_t w = p->held[q] + C;
            if (p->first[w] < p->first[w + 1] && w_part[w] == -1
                && w_ready[w] <= now) {
                memory[s] += p->change[w];
                w_part[w] = 0;
                started[w]++;
            }
        }
        int moved = 1;
        while (moved) {
            moved = 0;
            for (int64_t lane = LANES - 1; lane >= 0; lane--) {
                if (free_at[LANES * s + lane] > now) continue;
                double best_key = INFINITY, next = INFINITY;
                int64_t chosen = -1; /* a flight, or MOST_FLIGHTS + number */
                int is_short = lane == COMPUTE && flying[3] > r->most_w[s];
                for (int64_t k = 0; k < flying[0]; k++) {
                    Flight one = mine[k];
                    if (one.part == p->first[one.number + 1]) continue;
                    const int64_t stop = p->first[one.number + 1];
                    int64_t part = one.part;
                    double at = one.ready;
                    while (part < stop && p->lane[part] != lane) at += p->time[part++];
                    if (part == stop) continue;
                    if (part > one.part || at > now) {
                        if (at < next) next = at;
                        continue;
                    }
                    double key = (double)one.microbatch * p->round
                        + r->rank[one.number] - r->go_on;
                    if (key < best_key) { best_key = key; chosen = k; }
                }
                for (int64_t k = from; k < to; k++) {
                    const int64_t q = p->held[k], i = started[q];
                    if (i == m || p->lane[p->first[q]] != lane) continue;
                    if (flying[0] >= r->most) continue;
                    double arrival = q == 0 ? 0.0 : ends[(q - 1) * m + i];
                    if (arrival == INFINITY) continue;
                    if (q > 0) arrival += p->delay[q - 1];
                    if (q < C) {
                        if (flying[1] >= r->most_f[s]) continue;
                        if (q == first_f
                            && started[q] - started[last_b] >= r->cap[s]) continue;
                        double need = memory[s] + p->change[q];
                        const int64_t oldest = started[last_f];
                        for (int64_t j = from; p->held[j] < C; j++) {
                            const int64_t other = p->held[j];
                            if (other != q && started[other] <= oldest && oldest < m)
                                need += p->change[other];
                        }
                        if (need > p->room[s]) {
                            if (arrival <= now) is_short = 1;
                            continue;
                        }
                    } else if (flying[2] >= r->most_b[s]) continue;
                    if (arrival > now) {
                        if (arrival < next) next = arrival;
                        continue;
                    }
                    double key = (double)i * p->round + r->rank[q];
                    if (key < best_key) { best_key = key; chosen = MOST_FLIGHTS + q; }
                }
                if (chosen < 0 || is_short) {
                    /* a W: where nothing else can go, or memory is short */
                    int64_t w_best = -1;
                    double w_key = INFINITY;
                    for (int64_t k = from; k < to; k++) {
                        const int64_t w = p->held[k] + C;
                        if (p->held[k] < C || started[w] == m || w_part[w] < 0) continue;
                        const int64_t part = p->first[w] + w_part[w];
                        if (p->first[w] == p->first[w + 1] || p->lane[part] != lane)
                            continue;
                        const int64_t i = started[w];
                        double at = sources[p->source[part] * m + i];
                        if (w_ready[w] > at) at = w_ready[w];
                        if (at > now) continue;
                        double key = (double)i * p->round + r->rank[p->held[k]]
                            - (w_part[w] ? p->round : 0.0);
                        if (key < w_key) { w_key = key; w_best = w; }
                    }
                    if (w_best >= 0) {
                        const int64_t part = p->first[w_best] + w_part[w_best];
                        const double allowed = started[first_f] == m
                            ? r->tail[s] : r->tolerance[s];
                        if (is_short
                            || (chosen < 0
                                && now + p->time[part] * (1.0 - allowed) <= next))
                            chosen = MOST_FLIGHTS + w_best;
                    }
                }
                if (chosen < 0) continue;
                int64_t q, i, part;
                if (chosen < MOST_FLIGHTS) {
                    q = mine[chosen].number;
                    i = mine[chosen].microbatch;
                    part = mine[chosen].part;
                } else {
                    q = chosen - MOST_FLIGHTS;
                    i = started[q];
                    part = p->first[q] + (q >= 2 * C ? w_part[q] : 0);
                }
                const double end = now + p->time[part];
                if (begun[s] < 0.0) begun[s] = now;
                else if (lane == COMPUTE)
                    idle[s] += now - (free_at[LANES * s] > begun[s]
                        ? free_at[LANES * s] : begun[s]);
                if (idle[s] + work[s] > best) { result = GIVEN_UP; goto out; }
                free_at[LANES * s + lane] = end;
                if (end > last_end[s]) last_end[s] = end;
                parts[row_from[s] + n_row[s]] = part;
                microbatches[row_from[s] + n_row[s]++] = i;
                if (!heap_push(&heap, end, s)) goto out;
                moved = 1;
                if (q >= 2 * C) {
                    w_ready[q] = end;
                    if (part == p->first[q]) flying[3]--;
                    if (part + 1 == p->first[q + 1]) w_part[q] = -1;
                    else w_part[q]++;
                    continue;
                }
                sources[part * m + i] = end;
                if (chosen >= MOST_FLIGHTS) {
                    started[q]++;
                    if (q < C) { flying[1]++; memory[s] += p->change[q]; }
                    else flying[2]++;
                    chosen = flying[0]++;
                    mine[chosen] = (Flight){q, i, part, 0.0};
                }
                mine[chosen].part = part + 1;
                mine[chosen].ready = end;
                if (part + 1 == p->first[q + 1]) {
                    ends[q * m + i] = end;
                    if (q + 1 < 2 * C
                        && !heap_push(&heap, end + p->delay[q], p->stage[q + 1]))
                        goto out;
                }
            }
        }
    }
    result = DONE;
    *span = 0.0;
    for (int64_t s = 0; s < S; s++) {
        if (n_row[s] < row_from[s + 1] - row_from[s]) result = GIVEN_UP;
        if (last_end[s] - begun[s] > *span) *span = last_end[s] - begun[s];
    }
out:
    free(ends); free(sources); free(started); free(w_part); free(w_ready);
    free(free_at); free(begun); free(idle); free(work); free(memory); free(last_end);
    free(n_row); free(n_flying); free(flights); free(heap.events);
    return result;
}
