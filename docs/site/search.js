/* Ranks what a search finds: pages that explain stand before the API, and headings before words in a text. */
var Scorer = {
  score: ([page, title, anchor, description, score]) =>
    score + (page.includes("docs/api/") ? -8 : 0) + (description === null && !anchor ? 3 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 25,
  partialTitle: 12,
  term: 5,
  partialTerm: 2,
};
