/* Ranks what a search finds: pages named by the words searched for, then headings, then texts; the API comes last. */
var Scorer = {
  score: ([page, title, anchor, description, score]) => {
    const words = (new URLSearchParams(location.search).get("q") || "").toLowerCase().trim();
    const isNamed = !anchor && title.toLowerCase().includes(words);
    return score + (isNamed ? 10 : 0) + (page.includes("docs/api/") ? -8 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 25,
  partialTitle: 12,
  term: 5,
  partialTerm: 2,
};
