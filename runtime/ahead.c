/*
 * Whether updates may begin before the norm of the gradient is known (offload/ahead.c does them, and can take them back). Trying costs
 * nothing when the step turns out not to clip, and what was done in vain when it does; where host memory does not hold the gradients all
 * passes are made again then, which takes another step's computing, and else gradients are written by none. So it is tried after a step that did not clip,
 * and after attempts that failed only when so many steps in a row did not. Clipping comes in stretches: at the start of a training
 * nearly every step clips, later hardly one does. No bit depends on any of this.
 */
#include "engine_internal.h"
#include <math.h>

enum { WAIT_MAX = 63 };

bool
spw__ahead_worth(const ahead_policy *p)
{
    return p->calm > p->wait;
}

void
spw__ahead_learn(ahead_policy *p, bool tried, bool stood)
{
    if (stood) {
        p->calm += p->calm < UINT32_MAX;
        p->wait = tried ? p->wait / 2 : p->wait;
    } else {
        p->calm = 0;
        p->wait = !tried ? p->wait : p->wait > WAIT_MAX / 2 ? WAIT_MAX : 2 * p->wait + 1;
    }
}

bool
spw__ahead_try(const spw_engine *e)
{
    return e->plan.ahead && e->on_gradients == NULL &&
           (strcmp(e->config.run.update_ahead, "always") == 0 || spw__ahead_worth(&e->ahead));
}

/*
 * A sum of squares never falls: once those that are there exceed what clipping allows, the step will clip. A unit with something that
 * is not finite is seen here before its update could see it.
 */
void
spw__ahead_see(spw_engine *e, double squares)
{
    if (!spw__norm_stands(e, sqrt(squares) * (1.0 / e->scaler.scale)))
        spw_store_step_hold(e->store);
}

/* Rounding a root and a product does not turn their order round: what the norm of a part says that of the whole will say. */
bool
spw__norm_stands(const spw_engine *e, double norm)
{
    const double limit = e->config.gradient_clipping;
    return isfinite(norm) && !(limit > 0 && norm > limit);
}

/* A rank without such gradients takes part in what the others make again. */
spw_status
spw__ahead_spent(spw_engine *e, bool *spent, spw_error *err)
{
    double count = spw_store_step_spent(e->store);
    if (e->ranks != NULL && e->may_spend)
        SPW_TRY(spw__ranks_sum(e->ranks, &count, 1, err));
    *spent = count > 0;
    return SPW_OK;
}
