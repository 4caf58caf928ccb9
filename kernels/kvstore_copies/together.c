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
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { IDLE, OFFERED, WORKING }; /* the states of the offer */
enum { WAIT = 128, WAKE = 129 }; /* FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE: the kernel's header is not everywhere */
enum { LOOKS = 1000, LOOK_AGAIN_NS = 20000 };

static struct {
    uint32_t state; /* what the helper sleeps on */
    void *all;
    uint64_t most;
} offer;
static uint32_t has_caller; /* 1: a caller has the helper, and alone writes to what follows and to an idle offer */
static int has_helper, follows_forks;

static void *help(void *unused)
{
    (void)unused;
    for (;;) {
        uint32_t state = OFFERED;
        if (__atomic_compare_exchange_n(&offer.state, &state, WORKING, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
            kvstore_copy_1(offer.all, offer.most);
            __atomic_store_n(&offer.state, IDLE, __ATOMIC_RELEASE);
        } else
            syscall(SYS_futex, &offer.state, WAIT, state, NULL, NULL, 0);
    }
    return NULL;
}

/* A fork has the memory of its parent, and none of its other threads. */
static void forget(void)
{
    offer.state = IDLE;
    has_caller = has_helper = 0;
}

__attribute__((constructor)) static void follow_forks(void)
{
    follows_forks = !pthread_atfork(NULL, NULL, forget);
}

/* Returns 1 where the helper runs now. A thread that may use one processor alone starts none, and where there is no
 * thread to be had the next call tries again. */
static int start(void)
{
    cpu_set_t processors;
    int is_one = !sched_getaffinity(0, sizeof processors, &processors) && CPU_COUNT(&processors) < 2;
    if (!follows_forks || is_one)
        return 0;
    sigset_t others, before; /* the process's signals are for its own threads; those of a wrong access are not blocked */
    sigfillset(&others);
    sigdelset(&others, SIGSEGV), sigdelset(&others, SIGBUS), sigdelset(&others, SIGILL), sigdelset(&others, SIGFPE);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    pthread_t thread;
    int failed = pthread_create(&thread, NULL, help, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed)
        return 0;
    pthread_setname_np(thread, "kvstore-copies");
    pthread_detach(thread);
    return 1;
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
    if (is_ours && !has_helper)
        has_helper = start();
    int is_offered = is_ours && has_helper;
    if (is_offered) {
        offer.all = all;
        offer.most = most;
        __atomic_store_n(&offer.state, OFFERED, __ATOMIC_RELEASE);
        syscall(SYS_futex, &offer.state, WAKE, 1, NULL, NULL, 0);
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
