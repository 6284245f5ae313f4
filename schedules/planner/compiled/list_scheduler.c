/* The list scheduler; search/list_scheduler.py explains its rules. */

#include "loops.h"

#ifndef ZBPP_STAMP
#define ZBPP_STAMP ""
#endif

/* A hash of the sources, which binding.py looks for. */
ZBPP_API const char zbpp_stamp[] = "zbpp sources " ZBPP_STAMP;

/* `Settings`; the order of stage s is order[order_from[s]] to order[order_from[s + 1] - 1]
   (NULL: there is none). */
typedef struct {
    int64_t is_fair;
    double overrun_tail, delay_b, delay_f;
    const double *offset;
    const int64_t *max_in_flight, *max_without_b, *early;
    const double *overrun;
    const int32_t *order;
    const int64_t *order_from;
} Settings;

/* How far a number of the chain has come. */
typedef struct {
    double *arrivals, next; /* arrival of its next pass; INFINITY: not known */
    int64_t n_arrivals, n_done;
} Number;

/* A stage of the plan as it grows. The W's that are pending follow the B's of its row
   from place `weight_of` on, in their order. */
typedef struct {
    double start, free, held, slack, idle, wake;
    int32_t *row;
    int64_t n_row, n_pending, weight_of, n_ordered, n_early;
} Stage;

/* A pass that is known to come. */
typedef struct {
    double rank, arrival;
    int64_t q;
} Known;

typedef struct {
    const Problem *of;
    const Settings *settings;
    Number *numbers;
    Stage *stages;
    Known *known;
    double most_idle;
} Draft;

/* The place of the B of the first pending W, from a place of the row on. */
static int64_t find_backward(const Problem *of, const Stage *stage, int64_t at) {
    while (stage->row[at] < of->n_chunks || stage->row[at] >= 2 * of->n_chunks) at++;
    return at;
}

static int fits(const Problem *of, int64_t s, int64_t q, double *held) {
    if (*held + of->peak[q] > of->limits[s]) return 0;
    *held += of->change[q];
    return 1;
}

static int can_drain(const Draft *draft, int64_t s, int64_t forward) {
    const Problem *of = draft->of;
    const Stage *stage = &draft->stages[s];
    int64_t n, at = stage->weight_of;
    const int64_t *mine = numbers_of(of, s, &n);
    double held = stage->held;
    if (!fits(of, s, forward, &held)) return 0;
    for (int64_t i = 0; i < stage->n_pending; i++, at++) {
        at = find_backward(of, stage, at);
        if (!fits(of, s, stage->row[at] + of->n_chunks, &held)) return 0;
    }
    int64_t end = draft->numbers[mine[0]].n_done + (forward == mine[0]);
    for (int64_t i = draft->numbers[mine[n - 1]].n_done; i < end; i++)
        for (int64_t place = 0; place < n; place++) {
            int64_t q = mine[place];
            if (draft->numbers[q].n_done + (q == forward) > i) continue;
            if (!fits(of, s, q, &held)) return 0;
            if (q >= of->n_chunks && !of->joint[s]
                && !fits(of, s, q + of->n_chunks, &held)) return 0;
        }
    return 1;
}

static double reserve(const Draft *draft, const int64_t *mine, int64_t n,
                      int64_t n_back) {
    double need = 0.0;
    for (int64_t place = 0; place < n / 2; place++) {
        int64_t forward = mine[place], backward = mine[n - 1 - place];
        double change = draft->of->change[forward];
        if (draft->numbers[forward].n_done <= n_back) need += change;
        need -= change * (double)(n_back - draft->numbers[backward].n_done);
    }
    return need > 0.0 ? need : 0.0;
}

static int has_room(const Draft *draft, int64_t s, int64_t q) {
    const Problem *of = draft->of;
    const Stage *stage = &draft->stages[s];
    int is_ordered = draft->settings->order != NULL;
    if (q >= of->n_chunks || is_ordered)
        return stage->held + of->needs[q] <= of->limits[s]
            || (!is_ordered && !stage->n_pending);
    int64_t n;
    const int64_t *mine = numbers_of(of, s, &n);
    int64_t n_back = draft->numbers[mine[n / 2]].n_done;
    double change = of->change[q], need = reserve(draft, mine, n, n_back);
    double room = of->forward_limits[s] - stage->held;
    if (draft->numbers[q].n_done != n_back) need += change;
    if (change <= room && need <= room) return 1;
    return of->forward_limits[s] < 0 && can_drain(draft, s, q);
}

static int is_before(Known one, Known other) {
    return one.rank < other.rank || (one.rank == other.rank && one.q < other.q);
}

/* See `_best_ready`. */
static int64_t best_ready(Draft *draft, int64_t n, double now) {
    const Problem *of = draft->of;
    const Settings *settings = draft->settings;
    Known *known = draft->known;
    for (int64_t i = 1; i < n; i++) {
        Known one = known[i];
        int64_t at = i;
        for (; at > 0 && is_before(one, known[at - 1]); at--) known[at] = known[at - 1];
        known[at] = one;
    }
    for (int64_t i = 0; i < n; i++) {
        Known one = known[i];
        if (one.arrival > now + of->tiny) continue;
        if (one.q >= of->n_chunks) return one.q;
        double b_from = now + (1 - settings->delay_b) * of->time[one.q] - of->tiny;
        double f_from = now + (1 - settings->delay_f) * of->time[one.q] - of->tiny;
        int is_held = 0;
        for (int64_t at = 0; at < i && !is_held; at++) {
            Known better = known[at];
            double last = better.q >= of->n_chunks ? b_from : f_from;
            is_held = better.rank < one.rank && better.q > one.q
                   && now + of->tiny < better.arrival && better.arrival < last;
        }
        if (!is_held) return one.q;
    }
    return -1;
}

/* A ready F that goes before a better B; -1: none. */
static int64_t early_forward(Draft *draft, int64_t s, int64_t n, double now) {
    Stage *stage = &draft->stages[s];
    for (int64_t i = 0; i < n && stage->n_early; i++) {
        Known one = draft->known[i];
        if (one.q >= draft->of->n_chunks || one.arrival > now + draft->of->tiny) continue;
        stage->n_early--;
        return one.q;
    }
    return -1;
}

/* The next pass of a stage by rules 1 to 3; -1: none. */
static int64_t choose(Draft *draft, int64_t s, double now) {
    const Problem *of = draft->of;
    const Settings *settings = draft->settings;
    const Number *numbers = draft->numbers;
    Stage *stage = &draft->stages[s];
    int64_t n_known = 0, n;
    const int64_t *mine = numbers_of(of, s, &n);
    int64_t first_b = mine[n / 2], last_b = mine[n - 1];
    double soon = now + of->tiny, next = INFINITY;
    int starved = 0;
    if (settings->order) n = 1;
    for (int64_t place = 0; place < n; place++) {
        int64_t q = mine[place];
        double rank = 0.0;
        if (settings->order) {
            int64_t at = settings->order_from[s] + stage->n_ordered;
            if (at == settings->order_from[s + 1]) break;
            q = settings->order[at];
        }
        int64_t i = numbers[q].n_done;
        double arrival = numbers[q].next;
        if (arrival == INFINITY) continue;
        if (!settings->order) {
            if (q == mine[0]
                && (i - numbers[last_b].n_done >= settings->max_in_flight[s]
                    || i - numbers[first_b].n_done >= settings->max_without_b[s]))
                continue;
            rank = (double)i * of->unit + settings->offset[q];
        }
        if (!has_room(draft, s, q)) {
            starved |= arrival <= soon;
            continue;
        }
        draft->known[n_known++] = (Known){rank, arrival, q};
        if (arrival > soon && arrival < next) next = arrival;
    }
    int64_t chosen = best_ready(draft, n_known, now);
    if (chosen < 0 || chosen >= of->n_chunks) {
        int64_t early = early_forward(draft, s, n_known, now);
        if (early >= 0) return early;
    }
    if (chosen >= 0 || !stage->n_pending) return chosen;
    stage->weight_of = find_backward(of, stage, stage->weight_of);
    int64_t weight = stage->row[stage->weight_of] + of->n_chunks;
    int is_tail = numbers[mine[0]].n_done == of->n_microbatches;
    double share = is_tail ? settings->overrun_tail : settings->overrun[s];
    double end = now + of->time[weight] * (1 - share);
    if (starved || end <= next + of->tiny) return weight;
    return settings->is_fair && stage->idle + next - now > draft->most_idle ? weight
                                                                            : -1;
}

/* Let the next pass of a number run as early as it can; its end. */
static double run(Draft *draft, int64_t s, int64_t q, double now) {
    const Problem *of = draft->of;
    Stage *stage = &draft->stages[s];
    Number *number = &draft->numbers[q];
    int64_t last = 2 * of->n_chunks - 1;
    if (q <= last && number->next > now) now = number->next;
    if (stage->start == INFINITY) {
        stage->start = now;
    } else {
        stage->slack -= now - stage->free;
        stage->idle += now - stage->free;
        if (stage->idle > draft->most_idle) draft->most_idle = stage->idle;
    }
    double end = now + of->time[q];
    stage->free = end;
    stage->held += of->change[q];
    stage->row[stage->n_row++] = (int32_t)q;
    if (q > last) {
        stage->n_pending--;
        stage->weight_of++;
        return end;
    }
    int64_t i = ++number->n_done;
    number->next = i < number->n_arrivals ? number->arrivals[i] : INFINITY;
    stage->n_ordered++;
    if (q >= of->n_chunks && !of->joint[s]) stage->n_pending++;
    if (q < last) {
        Number *other = number + 1;
        other->arrivals[other->n_arrivals++] = end + of->delay[q];
        if (other->next == INFINITY) other->next = end + of->delay[q];
    }
    return end;
}

static int64_t grow(Draft *draft, Heap *heap) {
    const Problem *of = draft->of;
    int64_t last = 2 * of->n_chunks - 1;
    if (!heap_push(heap, 0.0, of->stage[0])) return NO_MEMORY;
    while (heap->n) {
        Event event = heap_pop(heap);
        int64_t s = event.stage, n;
        double now = event.time;
        Stage *stage = &draft->stages[s];
        if (stage->wake != now) continue; /* it was woken earlier */
        int64_t q = choose(draft, s, now);
        if (q < 0) { /* rule 4: sleep until something arrives */
            const int64_t *mine = numbers_of(of, s, &n);
            stage->wake = INFINITY;
            for (int64_t at = 0; at < n; at++) {
                double arrival = draft->numbers[mine[at]].next;
                if (arrival > now + of->tiny && arrival < stage->wake)
                    stage->wake = arrival;
            }
            if (stage->wake < INFINITY && !heap_push(heap, stage->wake, s))
                return NO_MEMORY;
            continue;
        }
        stage->wake = run(draft, s, q, now);
        if (stage->slack < 0) return GIVEN_UP;
        if (!heap_push(heap, stage->wake, s)) return NO_MEMORY;
        if (q >= last) continue;
        const Number *next = &draft->numbers[q + 1];
        Stage *target = &draft->stages[of->stage[q + 1]];
        double arrival = next->arrivals[next->n_arrivals - 1];
        if (target->free < target->wake && target->wake > arrival) { /* asleep */
            target->wake = arrival;
            if (!heap_push(heap, arrival, of->stage[q + 1])) return NO_MEMORY;
        }
    }
    for (int64_t q = 0; q <= last; q++)
        if (draft->numbers[q].n_done < of->n_microbatches) return GIVEN_UP;
    return DONE;
}

/* Write the numbers of stage s from rows[rows_from[s]] on, and how many they are. */
ZBPP_API int64_t zbpp_list_schedule(const Problem *of, const Settings *settings,
                                    double below, int32_t *rows,
                                    const int64_t *rows_from, int64_t *lengths,
                                    double *span) {
    int64_t m = of->n_microbatches, p = of->n_stages, n = 2 * of->n_chunks;
    int64_t result = NO_MEMORY;
    Heap heap = {NULL, 0, 0};
    Draft draft = {.of = of, .settings = settings, .most_idle = -INFINITY};
    double *arrivals = calloc((size_t)(n * m), sizeof(double));
    draft.numbers = calloc((size_t)n, sizeof(Number));
    draft.stages = calloc((size_t)p, sizeof(Stage));
    draft.known = calloc((size_t)n, sizeof(Known));
    if (!arrivals || !draft.numbers || !draft.stages || !draft.known) goto end;
    for (int64_t q = 0; q < n; q++) {
        draft.numbers[q].arrivals = arrivals + q * m; /* the first: all there at 0 */
        draft.numbers[q].n_arrivals = q ? 0 : m;
        draft.numbers[q].next = q ? INFINITY : 0.0;
    }
    for (int64_t s = 0; s < p; s++) {
        Stage *stage = &draft.stages[s];
        stage->row = rows + rows_from[s];
        stage->slack = below - of->work[s] - of->tiny;
        stage->start = INFINITY;
        stage->n_early = settings->early[s];
        stage->wake = s == of->stage[0] ? 0.0 : INFINITY;
    }
    result = grow(&draft, &heap);
    *span = -INFINITY;
    for (int64_t s = 0; s < p; s++) {
        double one = draft.stages[s].free - draft.stages[s].start;
        if (one > *span) *span = one;
        lengths[s] = draft.stages[s].n_row;
    }
end:
    free(heap.events);
    free(arrivals);
    free(draft.numbers);
    free(draft.stages);
    free(draft.known);
    return result;
}
