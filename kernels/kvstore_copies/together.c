/* Copies a batch on the calling thread and on one that helps.
 *
 * The helper is no thread of Python's: such a one waits for its queue's lock and for the interpreter before it copies,
 * some 100 us, in which the caller has copied 4 MB. This one is awake after 20 us. It sleeps until a caller offers a
 * batch; one caller at a time has it, and others copy alone. A caller waits for nothing but the rows that the helper has
 * taken. */
#define _GNU_SOURCE
#include <stdint.h>

void kvstore_copy_1(void *all, uint64_t most);

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { IDLE, OFFERED, WORKING };            /* of the offer */
enum { NOT_STARTED, STARTED, CANNOT_START }; /* of the helper */
enum { LOOKS = 1000, LOOK_AGAIN_NS = 20000 };

static struct {
    uint32_t state; /* what the helper sleeps on */
    void *all;
    uint64_t most;
} offer;
static uint32_t has_caller; /* 1: a caller has the helper, and alone writes to what follows and to an idle offer */
static int helper;

static void *help(void *unused)
{
    (void)unused;
    prctl(PR_SET_NAME, "kvstore-copies");
    for (;;) {
        uint32_t state = OFFERED;
        if (__atomic_compare_exchange_n(&offer.state, &state, WORKING, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
            kvstore_copy_1(offer.all, offer.most);
            __atomic_store_n(&offer.state, IDLE, __ATOMIC_RELEASE);
        } else
            syscall(SYS_futex, &offer.state, FUTEX_WAIT_PRIVATE, state, NULL, NULL, 0);
    }
    return NULL;
}

/* A fork has the memory of its parent, and none of its other threads. */
static void forget(void)
{
    offer.state = IDLE;
    has_caller = 0;
    if (helper == STARTED)
        helper = NOT_STARTED;
}

static int start(void)
{
    static int is_forgotten_by_forks;
    cpu_set_t processors;
    if (sched_getaffinity(0, sizeof processors, &processors) || CPU_COUNT(&processors) < 2)
        return CANNOT_START;
    if (!is_forgotten_by_forks && pthread_atfork(NULL, NULL, forget))
        return CANNOT_START;
    is_forgotten_by_forks = 1;
    sigset_t others, before; /* the process's signals are for its own threads; those of a wrong access are not blocked */
    sigfillset(&others);
    sigdelset(&others, SIGSEGV), sigdelset(&others, SIGBUS), sigdelset(&others, SIGILL), sigdelset(&others, SIGFPE);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    pthread_t thread;
    int failed = pthread_create(&thread, NULL, help, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed)
        return CANNOT_START;
    pthread_detach(thread);
    return STARTED;
}

static void wait_for_helper(void)
{
    for (int look = 0; __atomic_load_n(&offer.state, __ATOMIC_ACQUIRE) == WORKING; look++)
        if (look >= LOOKS) /* it lost its processor */
            nanosleep(&(struct timespec){0, LOOK_AGAIN_NS}, NULL);
}

/* Copy as kvstore_copy_1 does, the helper at most ``most`` slices, too. Returns once all rows that were taken here are
 * copied. */
void kvstore_copy_together_1(void *all, uint64_t most)
{
    uint32_t nobody = 0;
    int is_ours = __atomic_compare_exchange_n(&has_caller, &nobody, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
    if (is_ours && helper == NOT_STARTED)
        helper = start();
    int is_offered = is_ours && helper == STARTED;
    if (is_offered) {
        offer.all = all;
        offer.most = most;
        __atomic_store_n(&offer.state, OFFERED, __ATOMIC_RELEASE);
        syscall(SYS_futex, &offer.state, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    }
    kvstore_copy_1(all, most);
    uint32_t state = OFFERED;
    if (is_offered && !__atomic_compare_exchange_n(&offer.state, &state, IDLE, 0, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE))
        wait_for_helper();
    if (is_ours)
        __atomic_store_n(&has_caller, 0, __ATOMIC_RELEASE);
}
#else
void kvstore_copy_together_1(void *all, uint64_t most)
{
    kvstore_copy_1(all, most);
}
#endif
