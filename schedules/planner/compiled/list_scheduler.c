/* The list scheduler; list_scheduler.py explains its rules.

   A pass is a row of parts, and each part computes or occupies the network. A stage
   computes one stretch at a time: the parts of a pass up to those on the network, which
   queue behind one another. When these have ended, the pass resumes. So the runtime
   executes it: one F of a stage and one B of a chunk are open at a time. A pass without
   parts is one part that computes. */

#include "loops.h"

#ifndef ZBPP_STAMP
#define ZBPP_STAMP ""
#endif

/* A hash of the sources, which `__init__.py` looks for. */
ZBPP_API const char zbpp_stamp[] = "zbpp sources " ZBPP_STAMP;

/* `Settings`; the order of stage s is order[order_from[s]] to order[order_from[s + 1] - 1]
   (NULL: there is none). */
typedef struct {
    int64_t is_fair, most_open;
    double delay_b, delay_f, go_on;
    const double *offset;
    const int64_t *max_in_flight, *max_without_b, *early;
    const int64_t *most_b, *most_w; /* NULL: without limit */
    const double *overrun, *overrun_tail;
    const int32_t *order;
    const int64_t *order_from;
} Settings;

/* An F or B that has started: its next part, and when that is ready. */
typedef struct {
    int64_t q, i, part, is_over;
    double ready;
} Flight;

/* A pass that is known to come. */
typedef struct {
    double rank, arrival;
    int64_t q;
} Known;

typedef struct {
    double memory, start, end, idle, free, network;
    int32_t *row;
    int64_t n_row, n_f, n_b, n_w, n_flights, n_early, n_ordered, n_backward;
    Flight *flights; /* at most one of a number */
} Stage;

typedef struct {
    const Problem *of;
    const Settings *settings;
    double *next;    /* arrival of the next F or B of a number; INFINITY: not known */
    double *ends;    /* of F's and B's, by number and micro-batch; INFINITY: not known */
    double *sources; /* ends of parts of B's, by part and micro-batch */
    double *w_ready; /* by number: when the next part of its W may start */
    int64_t *started, *w_part; /* by number; the part of a W: -1 while the last runs */
    int64_t *w_turn; /* by number and micro-batch: turn of the W on its stage */
    Stage *stages;
    Known *known;
    double most_idle;
    double *wakes; /* when each stage decides next */
    int64_t n_leaves, *winners;
} Draft;

/* Let a stage decide at a time. The tree has the stage that is next in winners[1], and
   of those at one time the first: a node k has the sooner of nodes 2k and 2k + 1. */
static void set_wake(Draft *draft, int64_t s, double time) {
    int64_t *winners = draft->winners;
    double *wakes = draft->wakes;
    wakes[s] = time;
    for (int64_t k = (draft->n_leaves + s) / 2; k; k /= 2) {
        int64_t left = winners[2 * k], right = winners[2 * k + 1];
        winners[k] = wakes[right] < wakes[left] ? right : left;
    }
}

/* Memory that the first micro-batch with no B yet needs for its other F's, less what
   the micro-batches before it free first. */
static double reserve(const Draft *draft, const int64_t *mine, int64_t n,
                      int64_t n_back) {
    double need = 0.0;
    for (int64_t k = 0; k < n / 2; k++) {
        double change = draft->of->change[mine[k]];
        if (draft->started[mine[k]] <= n_back) need += change;
        need -= change * (double)(n_back - draft->started[mine[n - 1 - k]]);
    }
    return need > 0.0 ? need : 0.0;
}

/* True if all micro-batches before the next one of an F have left the stage. */
static int is_alone(const Draft *draft, int64_t s, int64_t q) {
    const Problem *of = draft->of;
    int64_t n;
    const int64_t *mine = numbers_of(of, s, &n);
    for (int64_t k = n / 2; k < n; k++) {
        int64_t last = mine[k] + (of->joint[s] ? 0 : of->n_chunks);
        if (draft->started[last] < draft->started[q]) return 0;
    }
    return draft->stages[s].n_b == 0;
}

static int has_room(const Draft *draft, int64_t s, int64_t q) {
    const Problem *of = draft->of;
    const Stage *stage = &draft->stages[s];
    int is_ordered = draft->settings->order != NULL;
    if (q >= of->n_chunks || is_ordered)
        return stage->memory + of->needs[q] <= of->limits[s]
            || (!is_ordered && !stage->n_w);
    int64_t n;
    const int64_t *mine = numbers_of(of, s, &n);
    int64_t n_back = draft->started[mine[n / 2]];
    double change = of->change[q], need = reserve(draft, mine, n, n_back);
    double room = of->forward_limits[s] - stage->memory;
    if (draft->started[q] != n_back) need += change;
    if (change <= room && need <= room) return 1;
    return of->forward_limits[s] < 0 && is_alone(draft, s, q);
}

/* True if the rules delay the next pass of a number. */
static int is_delayed(const Draft *draft, int64_t s, int64_t q) {
    const Settings *settings = draft->settings;
    const Stage *stage = &draft->stages[s];
    const int64_t *started = draft->started;
    int64_t n;
    const int64_t *mine = numbers_of(draft->of, s, &n);
    if (stage->n_flights >= settings->most_open) return 1;
    if (q < draft->of->n_chunks && stage->n_f) return 1;
    for (int64_t k = 0; k < stage->n_flights; k++)
        if (stage->flights[k].q == q) return 1;
    if (settings->order) return 0;
    if (q >= draft->of->n_chunks)
        return settings->most_b && stage->n_b >= settings->most_b[s];
    return q == mine[0]
        && (started[q] - started[mine[n - 1]] >= settings->max_in_flight[s]
            || started[q] - started[mine[n / 2]] >= settings->max_without_b[s]);
}

static int is_before(Known one, Known other) {
    return one.rank < other.rank || (one.rank == other.rank && one.q < other.q);
}

/* The first pass that is there and delays no better one by too much; NULL: none. */
static const Known *best_ready(const Draft *draft, int64_t n, double now) {
    const Problem *of = draft->of;
    const Settings *settings = draft->settings;
    const Known *known = draft->known;
    for (int64_t k = 0; k < n; k++) {
        Known one = known[k];
        if (one.arrival > now + of->tiny) continue;
        if (one.q >= of->n_chunks) return &known[k];
        double time = of->part_time[of->part_from[one.q]];
        double b_from = now + (1 - settings->delay_b) * time - of->tiny;
        double f_from = now + (1 - settings->delay_f) * time - of->tiny;
        int is_blocked = 0;
        for (int64_t j = 0; j < k && !is_blocked; j++) {
            Known better = known[j];
            double last = better.q >= of->n_chunks ? b_from : f_from;
            is_blocked = better.rank < one.rank && better.q > one.q
                   && now + of->tiny < better.arrival && better.arrival < last;
        }
        if (!is_blocked) return &known[k];
    }
    return NULL;
}

/* The W of a stage that goes next: one that has begun, else the one that waits longest.
   -1: none can go. */
static int64_t next_weight(const Draft *draft, int64_t s, double now) {
    const Problem *of = draft->of;
    const int64_t C = of->n_chunks, m = of->n_microbatches;
    int64_t n, chosen = -1, least = INT64_MAX;
    const int64_t *mine = numbers_of(of, s, &n);
    if (of->joint[s]) return -1;
    for (int64_t k = n / 2; k < n; k++) {
        const int64_t b = mine[k], w = b + C, i = draft->started[w];
        if (i == draft->started[b] || draft->w_part[w] < 0) continue;
        const int64_t part = of->part_from[w] + draft->w_part[w];
        int is_last = part + 1 == of->part_from[w + 1];
        if (draft->w_ready[w] > now || draft->sources[of->source[part] * m + i] > now
            || (is_last && draft->ends[b * m + i] > now)) continue;
        int64_t turn = draft->w_part[w] ? -1 : draft->w_turn[w * m + i];
        if (turn < least) {
            least = turn;
            chosen = w;
        }
    }
    return chosen;
}

/* What a stage runs next: flight k as k, a pass of number q as n_numbers + q; -1: none. */
static int64_t choose(Draft *draft, int64_t s, double now) {
    const Problem *of = draft->of;
    const Settings *settings = draft->settings;
    const int64_t *started = draft->started, C = of->n_chunks;
    Stage *stage = &draft->stages[s];
    Known *known = draft->known;
    int64_t n_known = 0, n, chosen = -1;
    const int64_t *mine = numbers_of(of, s, &n);
    double soon = now + of->tiny, next = INFINITY, best = INFINITY;
    int is_short = settings->most_w && stage->n_w > settings->most_w[s];
    int is_starved = 0;
    for (int64_t k = 0; k < stage->n_flights; k++) {
        Flight one = stage->flights[k];
        if (one.is_over) continue;
        if (one.ready > now) {
            if (one.ready < next) next = one.ready;
            continue;
        }
        double rank = (double)one.i * of->unit - settings->go_on;
        if (!settings->order) rank += settings->offset[one.q];
        if (one.part == of->part_from[one.q + 1]) rank = -INFINITY; /* to end */
        if (rank < best) {
            best = rank;
            chosen = k;
        }
    }
    if (settings->order) n = stage->n_ordered < settings->order_from[s + 1]
                                                    - settings->order_from[s];
    for (int64_t k = 0; k < n; k++) {
        int64_t q = settings->order
            ? settings->order[settings->order_from[s] + stage->n_ordered] : mine[k];
        int64_t i = started[q];
        double arrival = draft->next[q];
        if (arrival == INFINITY || is_delayed(draft, s, q)) continue;
        if (!has_room(draft, s, q)) {
            is_starved |= arrival <= soon;
            continue;
        }
        if (arrival > soon && arrival < next) next = arrival;
        double rank = 0.0;
        if (!settings->order) rank = (double)i * of->unit + settings->offset[q];
        Known one = {rank, arrival, q};
        int64_t at = n_known++;
        for (; at > 0 && is_before(one, known[at - 1]); at--) known[at] = known[at - 1];
        known[at] = one;
    }
    const Known *ready = best_ready(draft, n_known, now);
    if (ready && ready->rank < best) chosen = 3 * C + ready->q;
    if (stage->n_early && !(ready && ready->q < C))
        for (int64_t k = 0; k < n_known; k++)
            if (known[k].q < C && known[k].arrival <= soon) {
                stage->n_early--;
                return 3 * C + known[k].q;
            }
    is_short |= is_starved;
    if (chosen >= 0 && !(is_short && settings->most_w)) return chosen;
    int64_t weight = next_weight(draft, s, now);
    if (weight < 0) return chosen;
    if (is_short) return 3 * C + weight;
    if (chosen >= 0) return chosen;
    int is_tail = started[mine[0]] == of->n_microbatches;
    double share = is_tail ? settings->overrun_tail[s] : settings->overrun[s];
    double time = of->part_time[of->part_from[weight] + draft->w_part[weight]];
    if (now + time * (1 - share) <= next + of->tiny
        || (settings->is_fair && stage->idle + next - now > draft->most_idle))
        return 3 * C + weight;
    return -1;
}

/* A stage computes from `now` on for some time; the end. */
static double compute(Draft *draft, Stage *stage, double now, double time) {
    if (stage->start == INFINITY) {
        stage->start = now;
    } else {
        stage->idle += now - stage->free;
        if (stage->idle > draft->most_idle) draft->most_idle = stage->idle;
    }
    stage->free = now + time;
    if (stage->free > stage->end) stage->end = stage->free;
    return stage->free;
}

/* Run a part of a W. */
static void run_weight(Draft *draft, int64_t s, int64_t w, double now) {
    const Problem *of = draft->of;
    Stage *stage = &draft->stages[s];
    int64_t part = of->part_from[w] + draft->w_part[w];
    draft->w_ready[w] = compute(draft, stage, now, of->part_time[part]);
    stage->row[stage->n_row++] = (int32_t)part;
    if (!draft->w_part[w]) stage->n_w--;
    draft->w_part[w] = part + 1 == of->part_from[w + 1] ? -1 : draft->w_part[w] + 1;
}

/* When a stage that can run nothing decides again: something is there. */
static double wakes_at(const Draft *draft, int64_t s, double now) {
    const Problem *of = draft->of;
    const Stage *stage = &draft->stages[s];
    double next = INFINITY;
    int64_t n;
    const int64_t *mine = numbers_of(of, s, &n);
    for (int64_t k = 0; k < stage->n_flights; k++) {
        double at = stage->flights[k].ready;
        if (at > now && at < next) next = at;
    }
    for (int64_t k = 0; k < n; k++) {
        double at = draft->next[mine[k]];
        if (at > now + of->tiny && at < next) next = at;
    }
    return next;
}

/* Let a pass end: its message leaves, and wakes a stage that is not busy. */
static void finish(Draft *draft, Flight *flight, double now) {
    const Problem *of = draft->of;
    int64_t q = flight->q;
    flight->is_over = 1;
    draft->ends[q * of->n_microbatches + flight->i] = now;
    if (q + 1 == 2 * of->n_chunks) return;
    int64_t reader = of->stage[q + 1];
    double arrival = now + of->delay[q], wake = draft->wakes[reader];
    if (draft->started[q + 1] == flight->i) draft->next[q + 1] = arrival;
    if (draft->stages[reader].free < wake && arrival < wake)
        set_wake(draft, reader, arrival);
}

/* Run the next stretch of a pass: what computes, and one part on the network. A pass
   that ends there ends for good when its stage turns to it again. */
static void run_stretch(Draft *draft, int64_t s, Flight *flight, double now) {
    const Problem *of = draft->of;
    const int64_t m = of->n_microbatches, stop = of->part_from[flight->q + 1];
    Stage *stage = &draft->stages[s];
    int is_network = 0;
    double end = compute(draft, stage, now, 0.0);
    while (flight->part < stop && !is_network) {
        int64_t part = flight->part++;
        is_network = of->is_network[part] != 0;
        if (is_network) {
            if (stage->network > end) end = stage->network;
            end = stage->network = end + of->part_time[part];
        } else {
            end = compute(draft, stage, end, of->part_time[part]);
        }
        if (flight->q >= of->n_chunks) draft->sources[part * m + flight->i] = end;
        stage->row[stage->n_row++] = (int32_t)part;
    }
    flight->ready = end;
    if (!is_network) finish(draft, flight, end);
}

static void run(Draft *draft, int64_t s, int64_t chosen, double now) {
    const Problem *of = draft->of;
    const int64_t C = of->n_chunks, m = of->n_microbatches, q = chosen - 3 * C;
    Stage *stage = &draft->stages[s];
    if (q < 0) {
        run_stretch(draft, s, &stage->flights[chosen], now);
        return;
    }
    if (q >= 2 * C) {
        run_weight(draft, s, q, now);
        return;
    }
    int64_t i = draft->started[q]++;
    double arrival = draft->next[q], next = INFINITY;
    if (i + 1 < m) next = q ? draft->ends[(q - 1) * m + i + 1] + of->delay[q - 1] : 0.0;
    draft->next[q] = next;
    stage->n_ordered++;
    if (q < C) {
        stage->n_f++;
        stage->memory += of->change[q];
    } else {
        stage->n_b++;
        draft->w_turn[(q + C) * m + i] = stage->n_backward++;
    }
    Flight *flight = &stage->flights[stage->n_flights++];
    *flight = (Flight){.q = q, .i = i, .part = of->part_from[q]};
    run_stretch(draft, s, flight, arrival > now ? arrival : now);
}

/* Free the memory of parts that have ended by now. */
static void drop_ended(Draft *draft, int64_t s, double now) {
    const Problem *of = draft->of;
    Stage *stage = &draft->stages[s];
    int64_t n_left = 0, n;
    const int64_t *mine = numbers_of(of, s, &n);
    for (int64_t k = 0; k < stage->n_flights; k++) {
        Flight one = stage->flights[k];
        if (!one.is_over || one.ready > now) {
            stage->flights[n_left++] = one;
        } else if (one.q < of->n_chunks) {
            stage->n_f--;
        } else {
            stage->n_b--;
            stage->memory += of->change[one.q];
            stage->n_w += !of->joint[s];
        }
    }
    stage->n_flights = n_left;
    for (int64_t k = n / 2; k < n; k++) {
        int64_t w = mine[k] + of->n_chunks;
        if (draft->w_part[w] >= 0 || draft->w_ready[w] > now) continue;
        stage->memory += of->change[w];
        draft->w_part[w] = 0;
        draft->started[w]++;
    }
}

static int64_t grow(Draft *draft, double below) {
    const Problem *of = draft->of;
    set_wake(draft, of->stage[0], 0.0);
    for (;;) {
        int64_t s = draft->winners[1];
        double now = draft->wakes[s];
        Stage *stage = &draft->stages[s];
        if (now == INFINITY) break;
        drop_ended(draft, s, now);
        int64_t chosen = choose(draft, s, now);
        draft->wakes[s] = INFINITY;
        if (chosen < 0) {
            set_wake(draft, s, wakes_at(draft, s, now));
            continue;
        }
        run(draft, s, chosen, now);
        double wake = draft->wakes[s]; /* what it ran may wake it before it is free */
        set_wake(draft, s, stage->free < wake ? stage->free : wake);
        if (stage->idle + of->work[s] + of->tiny > below) return GIVEN_UP;
    }
    for (int64_t q = 0; q < 3 * of->n_chunks; q++)
        if ((q < 2 * of->n_chunks || !of->joint[of->stage[q]])
            && draft->started[q] < of->n_microbatches) return GIVEN_UP;
    return DONE;
}

/* Write the parts that stage s runs from rows[rows_from[s]] on, and their number. Those
   of one part run in the order of the micro-batches. */
ZBPP_API int64_t zbpp_list_schedule(const Problem *of, const Settings *settings,
                                    double below,
                                    int32_t *rows, const int64_t *rows_from,
                                    int64_t *lengths, double *span) {
    const int64_t C = of->n_chunks, m = of->n_microbatches, p = of->n_stages;
    const int64_t n_parts = of->part_from[2 * C], n_times = (2 * C + n_parts) * m;
    int64_t result = NO_MEMORY, n_leaves = 1;
    while (n_leaves < p) n_leaves *= 2;
    Draft draft = {.of = of, .settings = settings, .most_idle = -INFINITY};
    draft.n_leaves = n_leaves;
    const int64_t n_never = n_times + 2 * C + n_leaves;
    double *times = calloc((size_t)(n_never + 3 * C), sizeof(double));
    int64_t *counts = calloc((size_t)(6 * C + 3 * C * m + 2 * n_leaves), sizeof(int64_t));
    Flight *flights = calloc((size_t)(2 * C), sizeof(Flight));
    draft.stages = calloc((size_t)p, sizeof(Stage));
    draft.known = calloc((size_t)(2 * C), sizeof(Known));
    if (!times || !counts || !flights || !draft.stages || !draft.known) goto end;
    for (int64_t k = 0; k < n_never; k++) times[k] = INFINITY;
    draft.ends = times;
    draft.sources = times + 2 * C * m;
    draft.next = times + n_times;
    draft.next[0] = 0.0;
    draft.wakes = draft.next + 2 * C;
    draft.w_ready = draft.wakes + n_leaves;
    draft.started = counts;
    draft.w_part = counts + 3 * C;
    draft.winners = counts + 6 * C;
    draft.w_turn = draft.winners + 2 * n_leaves;
    for (int64_t k = 2 * n_leaves - 1; k; k--)
        draft.winners[k] = k < n_leaves ? draft.winners[2 * k] : k - n_leaves;
    for (int64_t s = 0; s < p; s++) {
        Stage *stage = &draft.stages[s];
        stage->row = rows + rows_from[s];
        stage->start = INFINITY;
        stage->n_early = settings->early[s];
        stage->flights = flights + of->first[s];
    }
    result = grow(&draft, below);
    *span = -INFINITY;
    for (int64_t s = 0; s < p; s++) {
        double one = draft.stages[s].end - draft.stages[s].start;
        if (one > *span) *span = one;
        lengths[s] = draft.stages[s].n_row;
    }
end:
    free(times);
    free(counts);
    free(flights);
    free(draft.stages);
    free(draft.known);
    return result;
}
