/*
 * The loss scale of fp16 training: gradients are made larger by it, so that small ones do not become 0 in fp16, and smaller
 * again before the update. Dynamic, it is halved after an overflow and doubled after a while without. Pure.
 *
 * Source  DeepSpeed's documented keys fp16.*; Micikevicius et al. 2018, Mixed Precision Training.
 */
#include "runtime_internal.h"

void
spw_loss_scale_init(spw_loss_scaler *s, const spw_config *c)
{
    *s = (spw_loss_scaler){.scale = 1, .last_overflow = -1};
    if (!c->fp16)
        return;
    s->dynamic = c->loss_scale.fixed == 0;
    s->scale = s->dynamic ? 1 : c->loss_scale.fixed;
    for (uint64_t i = 0; s->dynamic && i < c->loss_scale.initial_power && i < 120; i++)
        s->scale *= 2;
    s->hysteresis = c->loss_scale.hysteresis;
}

/*
 * hysteresis overflows in a row are let pass before the scale falls; they are forgotten when it rises, or, consecutive,
 * after any step without one. It rises with the window's next step after as many without an overflow, and from there on
 * with each window.
 */
void
spw_loss_scale_update(spw_loss_scaler *s, const spw_config *c, bool overflow)
{
    if (!s->dynamic)
        return;
    if (overflow) {
        if (s->hysteresis <= 1)
            s->scale = s->scale / 2 > c->loss_scale.min ? s->scale / 2 : c->loss_scale.min;
        else
            s->hysteresis--;
        s->last_overflow = s->steps;
    } else {
        int64_t since = s->steps - s->last_overflow - 1;
        bool rises = since > 0 && since % (int64_t)c->loss_scale.window == 0;
        if (rises || c->loss_scale.consecutive_hysteresis)
            s->hysteresis = c->loss_scale.hysteresis;
        if (rises)
            s->scale *= 2;
    }
    s->steps++;
}

bool
spw_loss_scale_is_spent(const spw_loss_scaler *s, const spw_config *c)
{
    return s->dynamic && s->scale <= c->loss_scale.min && s->hysteresis <= 1;
}
