/*
 * In how many turns a layer's experts come, and how many micro-batches each serves. All at once where there is room. Where there is not, bytes
 * do not hang on the number of turns, but on how often they are taken: once for each pass. The more micro-batches a pass has, the more is held
 * of them meanwhile, on the device and as checkpoints. So passes of all, of half of that and so on are planned, each in the fewest
 * turns that fit, and by the rates that other choices go by (engine_choose.c) the one with the shortest step is taken.
 */
#include "engine_internal.h"
#include <math.h>
#include <string.h>

/* Whether sums of gradients come from other hosts in codes: then whose part an element is in decides about bits, and turns decide about that. */
static bool
is_coded_between_hosts(const spw_engine_options *o)
{
    const spw_config *c = o->config;
    if (!c->zero.quantized_gradients || c->zero.stage < 3)
        return false;
    return o->comm != NULL ? spw_comm_get_info(o->comm)->host_count > 1
                           : o->local_ranks > 0 && o->local_ranks < c->run.ranks;
}

/* Into how many turns a layer's experts can be cut, with so many micro-batches in a pass; *why: not at all, because ... */
static uint32_t
most_turns(const spw_engine_options *o, uint32_t micros, const char **why)
{
    const spw_model_config *m = &o->model->config;
    const spw_config *c = o->config;
    const bool sums = c->accumulation > micros;
    if (o->inference) {
        *why = NULL;
        return m->experts > 0 ? (uint32_t)m->experts : 1;
    }
    *why = m->experts == 0      ? "the model has no experts"
           : o->chain_extra > 0 ? "blocks are repeated"
           : c->run.expert_turns == 0 && is_coded_between_hosts(o)
               ? "zero_optimization.zero_quantized_gradients rounds what comes from other hosts, and turns decide what "
                 "does: "
                 "spillway.expert_turns must say how many"
           : sums && (c->run.grad_dtype != SPW_F32 || strcmp(c->run.gradients, "nvme") == 0)
               ? "gradients of several passes are then added up in host memory: spillway.grad_dtype must be fp32, and "
                 "spillway.gradients host"
           : sums && c->run.micro_batches_per_pass != micros && (m->tied || c->run.ranks > 1)
               ? (spw_model_reads_experts(m)
                      ? "micro-batches then come one by one, which rounds the sums of gradients over ranks and of tied "
                        "weights differently: spillway.micro_batches_per_pass must be 1"
                      : "several passes round the sums of gradients over ranks and of tied weights differently: "
                        "spillway.micro_batches_per_pass must say how many micro-batches each has")
               : NULL;
    return *why == NULL ? (uint32_t)m->experts : 1;
}

/* How many micro-batches a turn can serve: what reads their experts' sum is computed with the rest of the layer. */
static uint32_t
most_micros(const spw_engine_options *o)
{
    const spw_config *c = o->config;
    const uint64_t asked = c->run.micro_batches_per_pass, all = c->accumulation;
    if (o->inference || spw_model_reads_experts(&o->model->config))
        return 1;
    return (uint32_t)(asked > 0 && asked < all ? asked : all);
}

/* The next fewer; 0: there are none to be tried. */
static uint32_t
fewer_micros(const spw_engine_options *o, uint32_t micros)
{
    return micros == 1 || o->config->run.micro_batches_per_pass > 0 ? 0 : micros / 2;
}

/*
 * The way in which what experts read is kept in all layers if that is asked for, or in none. Where ranks share sequences none is: attention is then computed
 * again, or not, by all of them, and each may ask for something else.
 */
static expert_way
way_of(const spw_engine_options *o, uint32_t turns, uint32_t micros)
{
    const bool least = strcmp(o->config->run.recompute, "least") == 0 && spw_config_sharers(o->config) == 1;
    return (expert_way){turns, micros, least ? 0 : READ_NOT_KEPT};
}

/* What is asked of a way's plan: the plan, without what it moves, or how long a step takes, and at least however little is computed. */
typedef struct outlook {
    spw_plan plan;
    double seconds, uncomputed;
} outlook;

static spw_status
look_at(const spw_engine_options *o, expert_way way, bool fit_only, outlook *out)
{
    spw_engine_options own = *o;
    spw_error ignored = {0};
    spw_engine *e = NULL;
    spw_status st;
    own.plan_only = own.unexplained = true;
    own.fit_only = fit_only;
    own.plan_out = &out->plan;
    st = spw__engine_build(&e, &own, way, &ignored);
    out->seconds = st == SPW_OK && !fit_only ? spw__engine_seconds(e, &own, &out->uncomputed) : INFINITY;
    spw_engine_destroy(e);
    return st;
}

static bool
fits_in(const spw_engine_options *o, uint32_t turns, uint32_t micros)
{
    outlook found;
    return look_at(o, way_of(o, turns, micros), true, &found) != SPW_ENOFIT;
}

/*
 * The fewest turns that fit, of which there are most; twice as many where several micro-batches compute, so that the next one comes meanwhile.
 * 0: none do. More turns take less of the device, but for tables more of the host: so where the most do not fit others are tried all the same, if sure.
 */
static uint32_t
fewest_turns(const spw_engine_options *o, uint32_t most, uint32_t micros, bool sure)
{
    const bool most_fit = fits_in(o, most, micros);
    uint32_t turns = 2;
    if (!most_fit && !sure)
        return 0;
    while (turns < most && !fits_in(o, turns, micros))
        turns *= 2;
    if (turns >= most)
        return most_fit ? most : 0;
    turns *= micros > 1 ? 2 : 1;
    return turns < most ? turns : most;
}

/* How much shorter a step has to be for more passes, and for checkpoints of what experts read. */
static const double WORTH = 0.99, WORTH_KEEPING = 0.95;

/* Whether the way fits and has no more checkpoints on nvme than so many. */
static bool
spares_disk(const spw_engine_options *o, expert_way way, uint32_t most)
{
    outlook found;
    return look_at(o, way, true, &found) == SPW_OK && found.plan.activation_count[SPW_TIER_NVME] <= most;
}

/*
 * The way with what experts read kept in as many layers, the last ones, as memory is left for: a disk wears, so no more checkpoints go to one
 * than without, nvme.
 */
static expert_way
keeping(const spw_engine_options *o, expert_way way, uint32_t nvme)
{
    const uint32_t head = o->model->block_count - 1;
    uint32_t low = 1, high = head;
    way.read_kept_from = 0; /* nothing is held for layers without it then */
    if (spares_disk(o, way, nvme))
        return way;
    while (low < high) {
        way.read_kept_from = low + (high - low) / 2;
        if (spares_disk(o, way, nvme))
            high = way.read_kept_from;
        else
            low = way.read_kept_from + 1;
    }
    way.read_kept_from = high < head ? high : READ_NOT_KEPT;
    return way;
}

/* Seconds of a step, in which what experts read is kept where that is worth it. */
static double
shorter_of_both(const spw_engine_options *o, expert_way *way)
{
    expert_way other;
    outlook plain, kept;
    if (look_at(o, *way, false, &plain) != SPW_OK || way->micros == 1 ||
        strcmp(o->config->run.recompute, "auto") != 0 || !(plain.uncomputed < WORTH_KEEPING * plain.seconds))
        return plain.seconds;
    other = keeping(o, *way, plain.plan.activation_count[SPW_TIER_NVME]);
    if (other.read_kept_from == READ_NOT_KEPT || look_at(o, other, false, &kept) != SPW_OK ||
        !(kept.seconds < WORTH_KEEPING * plain.seconds))
        return plain.seconds;
    *way = other;
    return kept.seconds;
}

/*
 * The best of those that fit, of a process that need ask nobody; where bytes are not counted, that with the most micro-batches. turns 0: none
 * does.
 */
static expert_way
best_way(const spw_engine_options *o, uint32_t asked, uint32_t least_micros)
{
    const char *why;
    expert_way best = {0};
    double least = INFINITY;
    for (uint32_t micros = most_micros(o); micros > 0; micros = fewer_micros(o, micros)) {
        const uint32_t most = most_turns(o, micros, &why);
        uint32_t turns = 0;
        expert_way w;
        double s;
        if (most > 1 && asked > 0)
            turns = fits_in(o, asked, micros) ? asked : 0;
        else if (most > 1)
            turns = fewest_turns(o, most, micros, micros == least_micros);
        if (turns == 0)
            continue;
        w = way_of(o, turns, micros);
        s = o->uncounted || (micros == 1 && best.turns == 0) ? 0 : shorter_of_both(o, &w);
        if (best.turns != 0 && !(s < WORTH * least))
            break; /* fewer take no less: weights come more often */
        best = w;
        if (o->uncounted)
            break;
        least = s;
    }
    return best;
}

/* Memory with which a plan that does not fit would, in all. */
static uint64_t
least_bytes(const spw_plan *p)
{
    switch (p->lack) {
    case SPW_LACK_DEVICE: return p->host_bytes + p->least_bytes;
    case SPW_LACK_HOST: return p->device_bytes + p->least_bytes;
    case SPW_LACK_ROOM: return p->least_bytes;
    case SPW_LACK_NOTHING:
        return UINT64_MAX; /* it is another rank that does not have it: what is lacking here says more */
    default: return p->host_bytes + p->device_bytes;
    }
}

/* The fewest micro-batches that turns may serve, which need the least memory; 0: there can be no turns. */
static uint32_t
least_micros(const spw_engine_options *o, const char **why)
{
    uint32_t least = 0;
    for (uint32_t micros = most_micros(o); micros > 0; micros = fewer_micros(o, micros)) {
        const char *reason;
        if (most_turns(o, micros, &reason) > 1)
            least = micros;
        else if (least == 0)
            *why = reason;
    }
    return least;
}

/* Of ways that do not fit, the one that needs the least memory. */
typedef struct miss {
    spw_plan plan;
    spw_error err;
    bool any;
} miss;

static spw_status
attempt(spw_engine **out, const spw_engine_options *o, expert_way w, miss *m)
{
    spw_error now = {0};
    spw_status st = spw__engine_build(out, o, w, &now);
    if (st != SPW_ENOFIT || !m->any || least_bytes(o->plan_out) <= least_bytes(&m->plan)) {
        m->plan = *o->plan_out;
        m->err = now;
        m->any = true;
    }
    return st;
}

/*
 * Ranks find together the first that fits: most micro-batches, and fewest turns. Of ways between the first and the last a rank does not know what
 * the others lack: they are no advice.
 */
static spw_status
attempt_together(spw_engine **out, const spw_engine_options *o, uint32_t asked, miss *m)
{
    const char *why;
    spw_status st = SPW_ENOFIT;
    for (uint32_t micros = most_micros(o); micros > 0; micros = fewer_micros(o, micros)) {
        const uint32_t most = most_turns(o, micros, &why);
        for (uint32_t turns = asked > 0 ? asked : 2; most > 1; turns = 2 * turns < most ? 2 * turns : most) {
            const bool last = asked > 0 || turns >= most;
            miss between = {.any = false};
            if (o->plan_only && !last && !fits_in(o, turns, micros))
                continue;
            st = attempt(out, o, way_of(o, turns < most ? turns : most, micros), last ? m : &between);
            if (st != SPW_ENOFIT && !last)
                *m = between;
            if (st != SPW_ENOFIT)
                return st;
            if (last)
                break;
        }
    }
    return st;
}

/* The most turns, of passes with the most micro-batches, whose gradients need not wait in host memory, and with the fewest, of which least is held. */
static spw_status
attempt_most(spw_engine **out, const spw_engine_options *o, uint32_t turns, uint32_t least, miss *m)
{
    const char *why;
    const uint32_t most = most_micros(o);
    spw_status st = SPW_ENOFIT;
    if (most > least && most_turns(o, most, &why) > 1)
        st = attempt(out, o, way_of(o, turns, most), m);
    return st == SPW_ENOFIT ? attempt(out, o, way_of(o, turns, least), m) : st;
}

/* With why experts cannot come in turns, which would need less. */
static spw_status
all_at_once(spw_engine **out, const spw_engine_options *o, const char *why, spw_error *err)
{
    spw_error own = {0};
    spw_status st = spw__engine_build(out, o, way_of(o, 1, 1), &own);
    if (st == SPW_ENOFIT && why != NULL && o->model->config.experts > 1)
        return SPW_RAISE(err, st, "%s; a layer's experts do not come in turns: %s", own.message, why);
    if (st != SPW_OK && err != NULL)
        *err = own;
    return st;
}

/* Where nothing fits, the plan and the error are those of the way that needs the least memory. */
spw_status
spw__engine_in_turns(spw_engine **out, const spw_engine_options *o, spw_error *err)
{
    const char *why = NULL;
    const uint32_t asked = o->config->run.expert_turns, least = least_micros(o, &why);
    const uint32_t experts = (uint32_t)o->model->config.experts, given = asked < experts ? asked : experts;
    const bool together = o->config->run.ranks > 1 || (o->comm != NULL && spw_comm_get_info(o->comm)->world > 1);
    spw_plan plan = {0};
    spw_engine_options own = *o;
    miss m = {.any = false};
    spw_status st = SPW_ENOFIT;
    expert_way w = {0};
    *out = NULL;
    SPW_TRY(spw_model_check(o->model, err));
    if (asked > 1 && least == 0)
        return SPW_RAISE(err, SPW_ECONFIG, "spillway.expert_turns is %u: %s", asked, why);
    if (asked == 1 || least == 0)
        return all_at_once(out, o, asked == 0 ? why : NULL, err);
    own.plan_out = o->plan_out != NULL ? o->plan_out : &plan;
    if (asked == 0)
        st = attempt(out, &own, way_of(o, 1, 1), &m);
    if (st == SPW_ENOFIT && !together && !o->fit_only) /* a search asks whether anything fits at all */
        w = best_way(&own, given, least);
    if (st == SPW_ENOFIT && w.turns > 0)
        st = attempt(out, &own, w, &m);
    else if (st == SPW_ENOFIT && together)
        st = attempt_together(out, &own, given, &m);
    else if (st == SPW_ENOFIT)
        st = attempt_most(out, &own, asked > 0 ? given : experts, least, &m);
    if (st == SPW_ENOFIT)
        *own.plan_out = m.plan;
    if (st != SPW_OK && err != NULL)
        *err = m.err;
    return st;
}
